"""A leader that was only slow, and the standby that took it for frozen: for a moment there are two."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import memory
from paceline.cluster.crew import Crew
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.node import Node, Replaced
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.standby import Lead, stand_by
from paceline.cluster.store import LocalStore
from paceline.folder import RunFolder
from paceline.launch.nursing import Fork
from paceline.wires import messages, wire
from paceline.wires.board import Board

LEASE_S, PATIENCE_S = 0.2, 20.0
MEMORY = messages.Segment("group-1/memory-1", 4096)
KEPT = "segment/group-1/memory-1"


class NoCrew(Crew):
    def start(self, fork: Fork) -> None:
        return


class Slow:
    """A leader, in this thread: it does something only when it is told to."""

    def __init__(self, folder: RunFolder, place: Rendezvous, store: LocalStore) -> None:
        kept, board = Kept(), Board.create(4)
        board.leader = 1
        kept.keep(BOARD, os.dup(board.fd), 4)
        board.close()
        job = Job("train.py", [], False, {"workers": 2}, "/", [])
        lead = Lead(store, store.lead(0, os.getpid()), kept)
        nobody: Any = lambda: SimpleNamespace(pid=1, poll=lambda: None)  # noqa: E731
        self.node = Node(job, folder, place, lead, nobody, NoCrew)
        master: Any = SimpleNamespace(journal=Journal.begin(2, 0, 10, 0.0))
        self.node.begin(master)

    def turn_until(self, there: Callable[[], object]) -> None:
        while not there():
            self.node.turn(0.01)


class Standby:
    """Another one, in a thread. Whatever it takes the leader for, it goes no further than the store before it is let."""

    def __init__(self, place: Rendezvous, lease_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place, self._lease_s = place, lease_s
        self._leads: list[Lead | None] = []
        self.is_led, self._may_go_on, plain = threading.Event(), threading.Event(), LocalStore.lead

        def lead(store: LocalStore, after: int, pid: int, address: str = "") -> int:
            fence = plain(store, after, pid, address)
            if after:
                self.is_led.set()
                self._may_go_on.wait(PATIENCE_S)
            return fence

        monkeypatch.setattr(LocalStore, "lead", lead)
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        with closing(LocalStore(self._place.store)) as store:
            self._leads.append(stand_by(self._place, store, self._lease_s, PATIENCE_S))

    def takes_over(self) -> Lead:
        lead = self.ends()
        assert lead is not None and lead.fence == 2
        return lead

    def ends(self) -> Lead | None:
        self._may_go_on.set()
        self._thread.join(PATIENCE_S)
        (lead,) = self._leads
        return lead


Start = Callable[[float], tuple[Slow, Standby]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A leader, and a standby that takes it for frozen after so many seconds of silence."""
    folder = RunFolder.create(tmp_path, "it")
    place = Rendezvous.create(folder)
    with closing(LocalStore(place.store)) as store, ExitStack() as undo:

        def start(lease_s: float) -> tuple[Slow, Standby]:
            slow = Slow(folder, place, store)
            standby = Standby(place, lease_s, monkeypatch)
            slow.turn_until(lambda: slow.node.desk.shadows)

            def end() -> None:
                for peer in slow.node.desk.shadows:
                    peer.send(messages.Ended(0))
                lead = standby.ends()
                if lead is not None:
                    lead.kept.close()
                slow.node.close()
                store.remove(2 if lead is not None else 1)

            undo.callback(end)
            return slow, standby

        yield start


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


def nothing_was_said(to: socket.socket) -> bool:
    to.setblocking(False)
    with pytest.raises(BlockingIOError):
        to.recv(1)
    return True


def test_who_was_slow_gives_out_no_memory_any_more(start: Start) -> None:
    """The other worker asks the next leader for it, and would get another one by that name."""
    slow, standby = start(LEASE_S)
    with worker(slow) as asks:
        standby.takes_over()
        wire.send(asks, MEMORY)
        with pytest.raises(Replaced):
            slow.turn_until(lambda: False)
        assert nothing_was_said(asks)


def test_nor_does_one_that_is_replaced_while_it_makes_it(start: Start) -> None:
    slow, standby = start(LEASE_S)
    with worker(slow) as asks:
        plain = slow.node.segments.grant

        def grant(*arguments: Any) -> Any:
            made = plain(*arguments)
            standby.takes_over()
            return made

        slow.node.segments.grant = grant  # type: ignore[method-assign]
        wire.send(asks, MEMORY)
        with pytest.raises(Replaced):
            slow.turn_until(lambda: False)
        assert nothing_was_said(asks)


def test_what_it_gave_out_at_the_last_moment_the_next_one_has_too(start: Start) -> None:
    """That one leads by the store already, and has yet to write it on the board."""
    slow, standby = start(LEASE_S)
    with worker(slow) as asks:
        assert standby.is_led.wait(PATIENCE_S)
        wire.send(asks, MEMORY)
        slow.turn_until(lambda: slow.node.kept.get(KEPT))
        answer, (given,) = wire.receive(asks, messages.ANY)
        known = standby.takes_over().kept.get(KEPT)
        assert answer == messages.Granted(4096)
        assert known is not None and os.fstat(known[0]).st_ino == os.fstat(given).st_ino
        os.close(given)


def test_to_make_much_memory_is_no_silence(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each successor would be replaced in its turn while it makes the same."""
    slow, _ = start(PATIENCE_S)
    beats: list[float] = []
    monkeypatch.setattr(memory, "_STRETCH", 4096)
    monkeypatch.setattr(slow.node.board, "beat", lambda: beats.append(0.0), raising=False)
    assert slow.node.segments.grant("group-1/memory-1", 4 * 4096, 2)[0] == messages.Granted(4 * 4096)
    assert len(beats) == 4
    slow.node.board.leader = 2
    with pytest.raises(Replaced):
        slow.node.segments.grant("group-1/memory-2", 4096, 2)


def test_a_standby_that_takes_nothing_is_sent_everything_when_it_calls_again(start: Start) -> None:
    slow, _ = start(PATIENCE_S)
    (shadow,) = slow.node.desk.shadows
    shadow.flush = lambda: None  # type: ignore[method-assign]
    slow.node.kept.keep("segment/group-1/memory-2", os.memfd_create("it"), 0)
    assert shadow not in slow.node.desk.peers and shadow.ended is not None
    slow.turn_until(lambda: slow.node.desk.shadows)


def test_what_an_agent_of_the_past_writes_on_the_board_is_put_right(start: Start) -> None:
    slow, _ = start(PATIENCE_S)
    slow.node.board.next_term, slow.node.board.reach = 7, 99
    slow.node.look_around(0.0)
    assert slow.node.board.next_term == 0 and slow.node.board.reach == 2


def test_and_it_writes_nothing_once_it_knows_that_it_is_one(start: Start) -> None:
    slow, _ = start(PATIENCE_S)
    slow.node.board.leader, slow.node.board.reach = 2, 99
    with pytest.raises(Replaced):
        slow.node.look_around(0.0)
    assert slow.node.board.reach == 99
