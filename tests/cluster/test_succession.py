"""A leader that was only slow, and the standby that took it for frozen: for a moment there are two."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import messages, wire
from paceline.cluster.board import Board
from paceline.cluster.crew import Crew
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.node import Node, Replaced
from paceline.cluster.nursing import Fork
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.standby import Lead, stand_by
from paceline.cluster.store import LocalStore
from paceline.watch.folder import RunFolder

LEASE_S = 0.2
MEMORY = messages.Segment("group-1/memory-1", 4096)
KEPT = "segment/group-1/memory-1"


class NoCrew(Crew):
    def start(self, fork: Fork) -> None:
        return


class Slow:
    """A leader, in this thread: it does something only when it is told to."""

    def __init__(self, folder: RunFolder, place: Rendezvous, store: LocalStore) -> None:
        kept, board = Kept(), Board.create(4)
        kept.keep(BOARD, os.dup(board.fd), 4)
        board.close()
        job = Job("train.py", [], False, {"workers": 2, "lease": LEASE_S}, "/", [])
        lead = Lead(store, store.lead(0, os.getpid()), kept)
        nobody: Any = lambda: SimpleNamespace(pid=1, poll=lambda: None)  # noqa: E731
        self.node = Node(job, folder, place, lead, nobody, NoCrew)
        master: Any = SimpleNamespace(journal=Journal.begin(2, 0, 10, 0.0))
        self.node.begin(master)

    def turn_until(self, there: Callable[[], object]) -> None:
        while not there():
            self.node.turn(0.01)


@contextmanager
def two(tmp_path: Path) -> Iterator[tuple[Slow, Callable[[], Lead]]]:
    """The leader, and how its standby comes to lead."""
    folder = RunFolder.create(tmp_path, "it")
    place = Rendezvous.create(folder)
    leads: list[Lead | None] = []

    def stand() -> None:
        with closing(LocalStore(place.store)) as own:
            leads.append(stand_by(place, own, LEASE_S, 20.0))

    with closing(LocalStore(place.store)) as store:
        slow = Slow(folder, place, store)
        standby = threading.Thread(target=stand)
        standby.start()
        slow.turn_until(lambda: slow.node.desk.shadows)

        def takes_over() -> Lead:
            standby.join(20.0)
            (lead,) = leads
            assert lead is not None and lead.fence == 2
            return lead

        yield slow, takes_over
        takes_over().kept.close()
        slow.node.close()
        store.remove(2)


def worker(slow: Slow) -> socket.socket:
    """One that has said who it is."""
    address, secret = f"{slow.node.place.address}-1", slow.node.place.secret
    found: list[socket.socket] = []
    caller = threading.Thread(target=lambda: found.append(wire.connect(address, secret)))
    caller.start()
    slow.turn_until(lambda: not caller.is_alive())
    wire.send(found[0], messages.Hello(0, os.getpid()))
    slow.turn_until(lambda: slow.node.desk.worker_of)
    wire.close_all(wire.receive(found[0], messages.ANY)[1])
    return found[0]


def test_who_was_slow_gives_out_no_memory_any_more(tmp_path: Path) -> None:
    """The other worker asks the next leader for it, and would get another one by that name."""
    with two(tmp_path) as (slow, takes_over), worker(slow) as asks:
        takes_over()
        wire.send(asks, MEMORY)
        with pytest.raises(Replaced):
            slow.turn_until(lambda: False)
        asks.setblocking(False)
        with pytest.raises(BlockingIOError):
            asks.recv(1)


def test_what_it_gave_out_at_the_last_moment_the_next_one_has_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent, may_lead, lead = threading.Event(), threading.Event(), LocalStore.lead

    def slowly(self: LocalStore, after: int, pid: int, address: str = "") -> int:
        if after:
            is_silent.set()
            may_lead.wait(20.0)
        return lead(self, after, pid, address)

    monkeypatch.setattr(LocalStore, "lead", slowly)
    with two(tmp_path) as (slow, takes_over), worker(slow) as asks:
        assert is_silent.wait(20.0)
        wire.send(asks, MEMORY)
        slow.turn_until(lambda: slow.node.kept.get(KEPT))
        answer, (given,) = wire.receive(asks, messages.ANY)
        may_lead.set()
        known = takes_over().kept.get(KEPT)
        assert answer == messages.Granted(4096)
        assert known is not None and os.fstat(known[0]).st_ino == os.fstat(given).st_ino
        os.close(given)


def test_a_standby_that_takes_nothing_cannot_lead_before_it_has_called_again(tmp_path: Path) -> None:
    with two(tmp_path) as (slow, _):
        (shadow,) = slow.node.desk.shadows
        shadow.flush = lambda: None  # type: ignore[method-assign]
        slow.node.kept.keep("segment/group-1/memory-2", os.memfd_create("it"), 0)
        assert shadow not in slow.node.desk.peers and shadow.ended is not None
        slow.turn_until(lambda: slow.node.desk.shadows)


def test_one_that_thaws_cannot_take_the_board_back(tmp_path: Path) -> None:
    """It was frozen between the store and the board, and another one has taken over since."""
    with two(tmp_path) as (slow, takes_over):
        takes_over()
        slow.node.fence = 3  # as that other one has it
        slow.node.board.leader = 2
        slow.node.check_hold()
        assert slow.node.board.leader == 3


def test_what_an_agent_of_the_past_writes_on_the_board_is_put_right(tmp_path: Path) -> None:
    with two(tmp_path) as (slow, _):
        slow.node.board.next_term, slow.node.board.reach = 7, 99
        slow.node.look_around(0.0)
        assert slow.node.board.next_term == 0 and slow.node.board.reach == 2
