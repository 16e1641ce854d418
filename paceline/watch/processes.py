"""Which processes a run under way has, from its events. Pure: events in, rows of words out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_DOES = {"coordinator": "leads the run", "standby": "takes over if that dies"}
_HEAD = ("process", "pid", "machine", "why")


def processes_of(events: Iterable[dict[str, Any]], alive: Callable[[int], bool]) -> list[tuple[str, ...]]:
    """A table of those that live, so that any of them can be looked at, or killed. `alive`: whether this machine has a process of
    that number; of other machines' only their events tell.

    >>> rows = processes_of([{"event": "worker started", "worker": 0, "pid": 7, "why": "the run begins"}], lambda pid: True)
    >>> rows[1:]
    [('worker 0', '7', '', 'the run begins')]
    """
    agents: dict[str, int] = {}
    others: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "launched":  # anew, if it is resumed: what it had before is gone
                agents, others = {}, {}
            case "standby":
                agents = {"coordinator": event["leader"], "standby": event["pid"]}
            case "leading":
                agents = {"coordinator": event["pid"]}
            case "worker started" | "server started":
                role = event["event"].split()[0]
                others[role, event[role]] = event
            case "worker ended" | "server ended":
                role = event["event"].split()[0]
                others.pop((role, event[role]), None)
    found = [(role, str(pid), "", _DOES[role]) for role, pid in agents.items() if alive(pid)]
    for (role, number), event in sorted(others.items()):
        machine = event.get("machine")
        if machine is not None or alive(event["pid"]):
            found.append((f"{role} {number}", str(event["pid"]), "" if machine is None else str(machine), event["why"]))
    return [_HEAD, *found] if found else []
