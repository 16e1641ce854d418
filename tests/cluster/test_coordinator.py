"""A leader may die before any of its writes: the next one, who has what was written, brings it to the same end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.fleet import Address, Fleet
from paceline.cluster.job import Job
from paceline.cluster.journal import End, Journal, Machine
from paceline.cluster.outposts import Outposts
from paceline.cluster.store import StoreUnreachable
from paceline.wires.board import Board, Phase
from paceline.wires.messages import Claim, Value

KILLED = End(-signal.SIGKILL, Phase.REDUCE, 0)


class Office:
    """A store that is reached so many times."""

    def __init__(self, writes: int) -> None:
        self.left, self.state = writes, b""

    def write(self, state: bytes, views: list[Any]) -> None:
        if not self.left:
            raise StoreUnreachable("the leader is dead")
        self.left, self.state = self.left - 1, state


def begun() -> bytes:
    """Two machines with two workers and a server each."""
    journal = Journal.begin(4, 0, 10, 0.0, Machine("a", "a", 2), machines=2, servers=[400, 401])
    journal.machines[1] = Machine("b", "b", 2)
    journal.fleet = Fleet(2, 2, 10)
    journal.settle_in()
    journal.pids = dict.fromkeys(journal.running, 1)
    for number in journal.servers:
        _, server = journal.role(number)
        journal.fleet.came(server, Address(f"near-{server}", f"far-{server}", journal.homes[number]))
    journal.fleet.sized([100, 100, 1])
    return journal.encode()


def leader(state: bytes, writes: int) -> tuple[Coordinator, Office]:
    folder: Any = SimpleNamespace(event=lambda *args, **fields: None, log_of=lambda role, number: Path("/nowhere"))
    office: Any = Office(writes)
    coordinator = Coordinator(Job("train.py", [], False, {}, "/", []), folder, office, Journal.decode(state))
    coordinator.start = coordinator.kill = lambda number: None
    coordinator.changed = lambda: None
    return coordinator, office


def a_worker_is_killed(coordinator: Coordinator) -> None:
    """Of this machine: its next agent sees it too."""
    coordinator.worker_ended(3, KILLED)


def a_server_is_killed(coordinator: Coordinator) -> None:
    coordinator.worker_ended(401, KILLED)


def a_machine_is_lost(coordinator: Coordinator) -> None:
    """As soon as nothing was heard of it for a lease; from when this leader began to lead."""
    board = Board.create(2)
    node: Any = SimpleNamespace(
        selector=SimpleNamespace(register=lambda *args: None),
        board=board,
        job=coordinator._job,
        folder=SimpleNamespace(id="it"),
        place=SimpleNamespace(reach=SimpleNamespace(run="")),
        number=1,
    )
    door: Any = SimpleNamespace(expire=lambda now: None, refusals=SimpleNamespace(untold=list))
    try:
        Outposts(door, node, coordinator, fence=2).tick(float("inf"))
    finally:
        board.close()


def replicas_are_claimed(coordinator: Coordinator) -> None:
    for worker in range(4):
        coordinator.decide(worker, Claim([worker, 0, 1, 2, 3]))
    coordinator.worker_ended(3, KILLED)
    coordinator.decide(4, Claim([0, 1, 2, 3]))


@pytest.mark.parametrize("happens", [a_worker_is_killed, a_server_is_killed, a_machine_is_lost, replicas_are_claimed])
def test_the_next_leader_comes_to_the_same_end(happens: Callable[[Coordinator], None]) -> None:
    undisturbed, office = leader(begun(), writes=1000)
    happens(undisturbed)
    assert undisturbed.journal.encode() == office.state, "all is written down"
    for writes in range(1000 - office.left):
        first, office = leader(begun(), writes)
        with pytest.raises(StoreUnreachable):
            happens(first)
        second, _ = leader(office.state or begun(), writes=1000)
        happens(second)
        assert second.journal == undisturbed.journal, f"the first leader died after {writes} writes"


def test_a_machine_that_goes_hears_that_the_end_of_its_server_is_written_down() -> None:
    """It waits for that, and nothing else may happen that it would be told of."""
    coordinator, office = leader(begun(), writes=1000)
    heard: list[bytes] = []
    coordinator.journal.doomed = [401]
    coordinator.changed = lambda: heard.append(office.state)
    coordinator.worker_ended(401, KILLED)
    assert 401 in Journal.decode(heard[-1]).exits


def test_a_replica_is_given_to_one_worker_that_lives() -> None:
    coordinator, _ = leader(begun(), writes=1000)
    replicas_are_claimed(coordinator)
    assert coordinator.decide(4, Claim([0, 1, 2, 3])) == Value("3"), "it may ask again"
    assert coordinator.decide(3, Claim([3, 0])) == Value(""), "it is dead"
    coordinator.worker_ended(1, KILLED)
    assert coordinator.decide(5, Claim([3, 2, 1, 0])) == Value("1")
    assert coordinator.decide(2, Claim([0])) == Value("2"), "it has one"
    assert coordinator.decide(6, Claim([0, 1, 2, 3])) == Value(""), "all have one who lives"
