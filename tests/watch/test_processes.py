"""Which processes of a run live, by its events: those that one may want to look at, or to kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.watch.processes import processes_of


def event(name: str, why: str = "", **fields: Any) -> dict[str, Any]:
    return {"time": 100.0, "event": name, "why": why, **fields}


BEGINS = [
    event("launched", pid=10, machine=0),
    event("worker started", "the run begins", worker=0, pid=11),
    event("worker started", "the run begins", worker=1, pid=12),
    event("server started", "it holds parameters", server=0, pid=13),
    event("standby", leader=10, pid=14, machine=0),
]


def everybody(pid: int) -> bool:
    return True


def numbers(events: list[dict[str, Any]], machine: int = 0, alive: Callable[[int], bool] = everybody) -> dict[str, str]:
    return {row[0]: row[1] for row in processes_of(events, machine, alive)[1:]}


def test_all_of_a_run_under_way() -> None:
    want = {"coordinator": "10", "standby": "14", "server 0": "13", "worker 0": "11", "worker 1": "12"}
    assert numbers(BEGINS) == want


def test_who_has_died_is_not_there_and_its_replacement_says_for_whom_it_stands() -> None:
    dies = [
        event("worker ended", "was killed by SIGKILL", worker=1),
        event("worker started", "it stands for worker 1", worker=2, pid=15),
    ]
    rows = processes_of([*BEGINS, *dies], 0, everybody)
    assert ("worker 2", "15", "0", "it stands for worker 1") in rows and "worker 1" not in [row[0] for row in rows]


def test_the_standby_becomes_the_coordinator_and_has_a_standby_of_its_own() -> None:
    takes_over = event("leading", fence=2, pid=14, machine=0)
    assert numbers([*BEGINS, takes_over])["coordinator"] == "14" and "standby" not in numbers([*BEGINS, takes_over])
    again = [*BEGINS, takes_over, event("standby", leader=14, pid=16, machine=0)]
    assert (numbers(again)["coordinator"], numbers(again)["standby"]) == ("14", "16")


def test_who_is_not_there_is_not_named_unless_it_is_of_another_machine() -> None:
    elsewhere = [
        event("worker started", "the run begins", worker=5, pid=11, machine=1),
        event("leading", fence=2, pid=12, machine=1),
        event("standby", leader=10, pid=14, machine=0),
    ]
    assert processes_of(BEGINS, 0, lambda pid: False) == []
    found = processes_of([*BEGINS, *elsewhere], 0, lambda pid: False)
    assert found[1:] == [("coordinator", "12", "1", "leads the run"), ("worker 5", "11", "1", "the run begins")]


def test_a_resumed_run_has_none_of_those_before() -> None:
    again = [*BEGINS, event("launched", pid=20, machine=0), event("worker started", "the run begins", worker=0, pid=21)]
    assert numbers(again) == {"coordinator": "20", "worker 0": "21"}
