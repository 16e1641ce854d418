"""What became of a run's servers, from its events. Pure: events in, rows of words out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.memory import words

Row = tuple[str, ...]


@dataclass
class _Server:
    began: float
    ended: float | None = None
    end: str = ""
    holds: int = 0
    leads: int = 0


@dataclass
class _Failover:
    """From a server's death until all copies are made good again."""

    server: int
    at: float
    copies: int
    """Of each fragment, before it."""
    took_over: float | None = None
    replacement: int | None = None
    replaced: float | None = None
    whole: float | None = None
    over: bool = False
    """The run went back to a checkpoint: what comes later is not its doing."""


@dataclass
class _Story:
    servers: dict[int, _Server] = field(default_factory=dict)
    failovers: list[_Failover] = field(default_factory=list)
    copies: int = 0
    rollbacks: int = 0
    asked: int | None = None
    """How many there should be since the last `paceline scale`."""

    def take(self, event: dict[str, Any]) -> None:
        now, server = event["time"], event.get("server", -1)
        match event["event"]:
            case "server started":
                self.servers[server] = _Server(now)
                for failover in self.failovers:
                    if failover.replacement == server:
                        failover.replaced = now
            case "server ended" if server in self.servers:
                self.servers[server].ended, self.servers[server].end = now, event["why"]
                if event["lost"]:
                    self.failovers.append(_Failover(server, now, self.copies))
            case "starting a server" if "replaces" in event:
                for failover in self.failovers:
                    if failover.server == event["replaces"]:
                        failover.replacement = server
            case "rolling back":
                self.rollbacks += 1
                for failover in self.failovers:
                    failover.over = True
            case "scaling" if "servers" in event:
                self.asked = event["servers"]
                self.copies = min(self.copies, event["servers"])
                for failover in self.failovers:
                    failover.copies = min(failover.copies, event["servers"])
            case "layout":
                self._lay_out(now, event)

    def _lay_out(self, now: float, event: dict[str, Any]) -> None:
        for name, nbytes in event["bytes"].items():
            if int(name) in self.servers:
                self.servers[int(name)].holds, self.servers[int(name)].leads = nbytes, event["leads"][name]
        for failover in [failover for failover in self.failovers if not failover.over]:
            failover.took_over = failover.took_over or now
            if failover.whole is None and event["copies"] >= failover.copies:
                failover.whole = now
        self.copies = max(self.copies, event["copies"])


def servers_of(events: Iterable[dict[str, Any]], loads: Mapping[str, Mapping[str, Any]] = {}) -> list[list[Row]]:
    """Tables: how many there were, each with what it held last, each failover. None, if there were no servers.

    `loads`: what each has done, as the summary has it."""
    start, story = 0.0, _Story()
    for event in events:
        start = start or event["time"]
        if event["event"] == "launched":
            story = _Story()  # a resumed run's servers are others, with the same numbers
        story.take(event)
    if not story.servers:
        return []
    lost = f", {len(story.failovers)} of them lost" if story.failovers else ""
    if story.asked is not None:
        lost += f"; scaled to {story.asked}"
    if story.rollbacks:
        lost += f"; back to a checkpoint {story.rollbacks} time{'s' * (story.rollbacks != 1)}"
    count = len(story.servers)
    head: list[Row] = [(f"{count} server{'s' * (count != 1)}{lost}",)]
    done = ("received", "sent", "calls", "CPU") if loads else ()
    servers: list[Row] = [("server", "from", "to", "holds", "answers for", *done, "end")]
    servers += [
        _server_row(number, server, start, _load_words(loads.get(str(number))) if loads else ())
        for number, server in sorted(story.servers.items())
    ]
    failovers: list[Row] = [("failover", "at", "copies took over", "replacement", "all copies again")]
    failovers += [_failover_row(failover, start) for failover in story.failovers]
    return [head, servers, failovers] if story.failovers else [head, servers]


def _server_row(number: int, server: _Server, start: float, done: Row) -> Row:
    to = "" if server.ended is None else f"{server.ended - start:.1f} s"
    held = words(server.holds), words(server.leads)
    return (str(number), f"{server.began - start:.1f} s", to, *held, *done, server.end)


def _load_words(load: Mapping[str, Any] | None) -> Row:
    """Nothing is known of one that was lost with the coordinator's machine."""
    if load is None:
        return ("", "", "", "")
    return (words(load["received"]), words(load["sent"]), f"{load['calls']:,}", f"{load['cpu_s']:.1f} s")


def _failover_row(failover: _Failover, start: float) -> Row:
    def after(when: float | None) -> str:
        return "-" if when is None else f"+{when - failover.at:.2f} s"

    came = "" if failover.replacement is None else f"server {failover.replacement} "
    at = f"{failover.at - start:.1f} s"
    return (
        f"server {failover.server}",
        at,
        after(failover.took_over),
        came + after(failover.replaced),
        after(failover.whole),
    )
