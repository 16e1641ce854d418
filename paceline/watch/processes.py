"""Which processes a run under way has, from its events. Pure: events in, rows of words out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_DOES = {"coordinator": "leads the run", "standby": "takes over if that dies"}
_HEAD = ("process", "pid", "machine", "why")


def processes_of(events: Iterable[dict[str, Any]], machine: int, alive: Callable[[int], bool]) -> list[tuple[str, ...]]:
    """A table of those that live, so that any of them can be looked at, or killed. `machine`: this one's number; `alive`: whether
    it has a process of that number. Of other machines' only their events tell.

    >>> rows = processes_of([{"event": "worker started", "worker": 0, "pid": 7, "why": "the run begins"}], 0, lambda pid: True)
    >>> rows[1:]
    [('worker 0', '7', '0', 'the run begins')]
    """
    agents: dict[str, dict[str, Any]] = {}
    others: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "launched":  # anew, if it is resumed: what it had before is gone
                agents, others = {"coordinator": event}, {}
            case "leading":
                agents = {"coordinator": event}
            case "standby" if event.get("machine", 0) == agents.get("coordinator", {}).get("machine", 0):
                agents["standby"] = event
            case "worker started" | "server started":
                role = event["event"].split()[0]
                others[role, event[role]] = event
            case "worker ended" | "server ended":
                role = event["event"].split()[0]
                others.pop((role, event[role]), None)
    known = [(role, event, _DOES[role]) for role, event in agents.items()]
    known += [(f"{role} {number}", event, event["why"]) for (role, number), event in sorted(others.items())]
    found = [
        (name, str(event["pid"]), str(event.get("machine", 0)), why)
        for name, event, why in known
        if event.get("machine", 0) != machine or alive(event["pid"])
    ]
    return [_HEAD, *sorted(found)] if found else []
