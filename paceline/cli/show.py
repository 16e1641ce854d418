"""paceline show"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import runs_option
from paceline.cluster.rendezvous import Rendezvous
from paceline.folder import RunFolder
from paceline.watch.glance import glance, words
from paceline.watch.lines import aligned, compact
from paceline.watch.observed import observed
from paceline.watch.processes import processes_of
from paceline.watch.servers import servers_of
from paceline.watch.terminal import counted, summary_rows


@click.command("show")
@runs_option
@click.argument("run")
def command(run: str, runs: Path) -> None:
    """Show one run: its result, or how far it is and its processes; its settings with their origins, what its servers did
    and became, who waited for whom, its events.

    RUN is a run's id, the beginning of one, or 'last'.
    """
    folder = RunFolder.find(runs, run)
    summary, config = folder.read_json(folder.summary), folder.read_json(folder.config)
    settings, origins = config.get("settings", {}), config.get("origins", {})
    of_settings = {
        name: settings[name] for name in ("workers", "servers", "slots", "threads", "strategy") if name in settings
    }
    events = list(folder.read_lines(folder.events))
    place = Rendezvous.here(folder) if folder.machines() and "exit" not in summary else None
    known = {"exit": _how_it_stands(folder, place), **of_settings, **summary}
    table = [("setting", "value", "from"), *((k, str(v), origins.get(k, "")) for k, v in settings.items())]
    at = words(glance(place)) if place is not None and place.is_served else ""
    first, *others = summary_rows(known, str(folder.path))
    parts: list[Sequence[Sequence[str]]] = [
        [first, *([("at", at)] if at else []), *others],
        _processes(place, events),
        table if settings else [],
        *servers_of(events, summary.get("by_server") or {}),
        *observed(summary),
        timeline(events),
    ]
    click.echo("\n\n".join("\n".join(aligned(part)) for part in parts if part))


def _how_it_stands(folder: RunFolder, place: Rendezvous | None) -> str:
    """Of a run without a summary."""
    if place is None:
        return "running, or lost"
    if place.is_served:
        return "running"
    return f"lost: no agent of it lives here; with a checkpoint `paceline resume {folder.id}` goes on"


def _processes(place: Rendezvous | None, events: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Of a run that an agent of this machine has in hand: of one that is lost its pids may be others' by now."""
    if place is None or not place.is_served:
        return []
    return processes_of(events, place.machine, lambda pid: Path(f"/proc/{pid}").exists())


@dataclass
class _Told:
    """Events that say the same of several workers or servers, one right after the other."""

    at: float
    event: str
    why: str
    who: str
    role: str = ""
    numbers: list[int] = field(default_factory=list)
    """Of whom it is told, if `who` does not say."""


def timeline(events: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Seconds since the first event, what happened, to whom, and why."""
    told: list[_Told] = []
    for event in events:
        new = _told(event)
        if told and new.numbers and told[-1].numbers and _same(told[-1], new):
            told[-1].numbers += new.numbers
        else:
            told.append(new)
    return [(f"{t.at - told[0].at:7.1f} s", t.event, t.who or _names(t.role, t.numbers), t.why) for t in told]


def _same(one: _Told, other: _Told) -> bool:
    return (one.event, one.role, one.why) == (other.event, other.role, other.why)


def _told(event: dict[str, Any]) -> _Told:
    name, lines = event["event"], str(event["why"]).splitlines()
    why, who, workers = lines[0] if lines else "", "", event.get("workers")
    role = next((role for role in ("server", "worker") if event.get(role) is not None), "")
    numbers = [int(event[role])] if role else []
    if isinstance(workers, list):
        who = _names("worker", workers)
    elif isinstance(workers, int):
        who = counted(workers, "worker")
    elif name == "layout":
        who = _names("server", [int(server) for server in event.get("bytes", ())])
    for version in ("term", "layout"):
        if version in event:
            why = f"{version} {event[version]}: {why}"
    for number in numbers:
        why = why.removeprefix(f"{role} {number}: ").removeprefix(f"{role} {number} ")
    if name == "finished":
        result = f"{counted(event['steps'], 'step')}, weights {event['weights_sha256'][:12]}"
        why = result if why == name else f"{why}; {result}"
    return _Told(event["time"], name, why, who, role, numbers)


def _names(role: str, numbers: list[int]) -> str:
    return f"{role}{'s' * (len(numbers) > 1)} {compact(sorted(numbers))}" if numbers else ""
