"""A replica's state on its way to another machine, and to a newcomer: real connections between workers that are none."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.apart import couriers, passage
from paceline.apart.copies import Copies
from paceline.apart.passage import Meter, Passage
from paceline.errors import PacelineError, ResourceError, TermEnded
from paceline.state import alike
from paceline.tensors.snapshot import Snapshot
from paceline.wires.listener import Listener
from paceline.wires.messages import Claim, Get, Needed, Next, Value
from paceline.wires.tls import Identity
from paceline.wires.view import View
from tests.cluster.visitors import PATIENCE_S, SECRET

SLOTS = 3


def state(rounds: int, numel: int = 5000) -> Snapshot:
    return Snapshot({"rounds": rounds, "tensor": torch.full((numel,), float(rounds))})


class Network:
    """Worker k is on machine k, and trains slot k's replica."""

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity
        self.lost: set[int] = set()
        self.memory: dict[int, dict[str, int]] = {}
        self.workers: dict[int, Worker] = {}

    def worker(self, number: int, machine: int | None = None) -> Worker:
        machine = number if machine is None else machine
        self.workers[number] = Worker(self, number, machine, Listener("127.0.0.1", SECRET, self._identity))
        return self.workers[number]

    def lose(self, number: int) -> None:
        """With its machine."""
        self.lost.add(number)
        self.workers[number].listener.close()

    def view(self, *members: int) -> None:
        for worker in self.workers.values():
            worker.session.homes = {member: self.workers[member].machine for member in members}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        for thread in threading.enumerate():
            if thread.name.startswith("paceline-inbox"):
                thread.join(PATIENCE_S)
        for worker in self.workers.values():
            worker.copies.lockers.close()
        for held in self.memory.values():
            for fd in held.values():
                os.close(fd)


class Worker:
    def __init__(self, network: Network, number: int, machine: int, listener: Listener) -> None:
        self.network, self.number, self.machine, self.listener = network, number, machine, listener
        self.full = self.ended = False
        self.session = SimpleNamespace(
            settings=SimpleNamespace(slots=SLOTS, state_copies=True),
            ticket=SimpleNamespace(machine=machine, secret=SECRET.hex()),
            worker=number, listener=listener, homes={}, ask=self._ask, line_of_its_own=lambda: self._ask,
            segment=self._segment, check_run=self._check_run, overtaken=False, view=View(1, ()), resume_from="",
            board=SimpleNamespace(gone=lambda worker: worker in network.lost),
            give_up_unled=lambda: None, take_view=lambda answer: None,
        )  # fmt: skip
        session: Any = self.session
        self.copies = Copies(session)

    def _check_run(self) -> None:
        if self.ended:
            raise PacelineError("the test is over")

    def _ask(self, message: Any, check: Callable[[], None] = lambda: None) -> tuple[Any, list[int]]:
        match message:
            case Get(key):
                return Value(self.network.workers[int(key.removeprefix("link/"))].listener.address), []
            case Claim(slots):
                return Value(str(slots[0])), []
            case Needed():
                return Next(1, [], [], 0), []
        raise AssertionError(message)

    def _segment(self, name: str, size: int, ask: object) -> int:
        """As the machine's agent gives them."""
        held = self.network.memory.setdefault(self.machine, {})
        if name not in held:
            if self.full and size > 4096:
                raise ResourceError("no shared memory")
            held[name] = os.memfd_create(name)
            os.ftruncate(held[name], size)
        return os.dup(held[name])

    def leaves(self, rounds: int, slot: int | None = None) -> None:
        """What its own replica, or a machine, has of a slot."""
        self.copies.lockers.of(self.number if slot is None else slot).put(rounds, state(rounds))

    def offers(self, rounds: int) -> None:
        self.leaves(rounds)
        self.copies.offer(self.number)

    def has(self, slot: int) -> int:
        locker = self.copies.lockers.of(slot)
        found = Snapshot.read(locker.look()).tree
        assert found["rounds"] == locker.rounds and torch.equal(found["tensor"], torch.full((5000,), found["rounds"]))
        return int(found["rounds"])

    def end(self) -> None:
        self.ended = True
        self.copies.close()
        if self.number not in self.network.lost:
            self.listener.close()


@pytest.fixture(params=["tcp", "tls", "thin"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """`thin`: all pieces but the first are packed."""
    monkeypatch.setattr(alike, "_MOST", 1000)
    monkeypatch.setattr(passage, "_TELLING", 1000)
    monkeypatch.setattr(passage, "_THIN", math.inf if request.param == "thin" else 0.0)
    found = Network(Identity.make() if request.param == "tls" else None)
    yield found
    found.close()


def test_what_a_replica_leaves_is_on_the_next_machine_before_it_exchanges_and_moves_on_when_that_is_lost(
    network: Network,
) -> None:
    first, second, third = (network.worker(k) for k in range(3))
    network.view(0, 1, 2)
    for rounds in (3, 4):
        first.offers(rounds)
        first.copies.wait()
        assert second.has(0) == rounds and third.copies.lockers.of(0).empty
    network.lose(1)
    first.copies.wait()
    assert third.has(0) == 4
    network.lose(2)
    first.offers(5)
    first.copies.wait()  # there is nobody left to have it


def test_a_copy_that_did_not_come_whole_does_not_count_and_is_brought_again(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    first.offers(1)
    first.copies.wait()
    torn, plain = threading.Event(), passage.fill

    def fill(room: memoryview, *rest: Any) -> bool:
        if torn.is_set():
            return plain(room, *rest)
        room[:] = b"\xff" * len(room)
        assert second.has(0) == 1
        torn.set()
        return False

    monkeypatch.setattr(passage, "fill", fill)
    first.offers(2)
    first.copies.wait()
    assert torn.is_set() and second.has(0) == 2


class Sent:
    """What is passed on, byte for byte; behind so many pieces the connection breaks, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks_behind: int = 0) -> None:
        self.pieces: list[bytes] = []
        plain = Passage.pass_on

        def pass_on(passage: Passage, stretch: memoryview) -> None:
            self.pieces.append(bytes(stretch))
            plain(passage, stretch)
            if len(self.pieces) == breaks_behind:
                passage.end()

        monkeypatch.setattr(Passage, "pass_on", pass_on)

    @property
    def twice(self) -> int:
        return len(self.pieces) - len(set(self.pieces))


def varied(rounds: int) -> Snapshot:
    """Of which no piece is like another one."""
    return Snapshot({"rounds": rounds, "tensor": torch.arange(5000) + 5000.0 * rounds})


def test_a_copy_whose_connection_breaks_goes_on_where_it_was(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    sent = Sent(monkeypatch, breaks_behind=12)
    first.copies.lockers.of(0).put(3, varied(3))
    first.copies.offer(0)
    first.copies.wait()
    whole = bytes(first.copies.lockers.of(0).look())
    assert bytes(second.copies.lockers.of(0).look()) == whole and second.copies.lockers.of(0).rounds == 3
    assert len(sent.pieces) > 12
    assert sent.twice < 6, "what was on its way when it broke; the rest was not sent again"


def test_a_newcomers_state_whose_connection_breaks_goes_on_where_it_was(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newcomer = network.worker(0), network.worker(7, machine=1)
    first.copies.lockers.of(0).put(4, varied(4))
    first.copies.lockers.of(2).put(4, varied(4))
    network.view(0)
    newcomer.copies.claim([2])
    sent = Sent(monkeypatch, breaks_behind=12)
    newcomer.copies.bring(2, drops=False)
    whole = bytes(first.copies.lockers.of(2).look())
    assert bytes(newcomer.copies.lockers.of(2).look()) == whole
    assert len(sent.pieces) > 12 and sent.twice < 6


def test_what_the_replica_there_has_left_too_is_not_sent(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    second.copies.claim([1])
    sent = Sent(monkeypatch)
    monkeypatch.setattr(couriers, "_PATIENCE_S", 0.0)
    second.leaves(4)
    first.offers(4)
    first.copies.wait()
    assert second.has(0) == 4 and not sent.pieces
    first.offers(5)
    first.copies.wait()
    assert second.has(0) == 5 and sent.pieces, "that is of another round"


def test_what_was_sent_of_a_state_is_counted_where_it_was_sent(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    assert first.copies.sent_bytes == 0
    given: dict[Meter, int] = {}
    plain = Passage._send

    def send(passage: Passage, rest: memoryview) -> None:
        given[passage._meter] = given.get(passage._meter, 0) + rest.nbytes
        plain(passage, rest)

    monkeypatch.setattr(Passage, "_send", send)
    first.copies.lockers.of(0).put(3, varied(3))
    first.copies.offer(0)
    first.copies.wait()
    assert first.copies.sent_bytes == given[first.copies._meter] > 1000
    assert 0 < second.copies.sent_bytes < 1000, "which it lacks, and that it has them"


def test_on_a_thin_link_fewer_bytes_are_sent(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    sizes: list[int] = []
    plain = Passage._send

    def send(passage: Passage, rest: memoryview) -> None:
        sizes.append(rest.nbytes)
        plain(passage, rest)

    monkeypatch.setattr(Passage, "_send", send)
    first.copies.lockers.of(0).put(3, varied(3))
    first.copies.offer(0)
    first.copies.wait()
    whole = bytes(first.copies.lockers.of(0).look())
    assert bytes(second.copies.lockers.of(0).look()) == whole
    assert (sum(sizes) < 0.95 * len(whole)) == (passage._THIN > 0)


def test_the_wait_for_a_copy_ends_with_the_view(network: Network) -> None:
    first = network.worker(0)
    network.worker(1).copies._inbox.own = 0  # and so it takes none in
    network.view(0, 1)
    first.offers(1)
    first.session.overtaken = True
    with pytest.raises(TermEnded):
        first.copies.wait()


def test_a_machine_without_memory_for_copies_is_an_error_that_says_so(network: Network) -> None:
    first, second = network.worker(0), network.worker(1)
    second.full = True
    network.view(0, 1)
    first.offers(1)
    with pytest.raises(ResourceError, match=r"machine 1 has no memory.*--no-state-copies"):
        first.copies.wait()


@pytest.mark.parametrize(("near", "far", "counts"), [(4, 3, 4), (3, 4, 4), (4, 4, 4), (-1, 4, 4), (4, -1, 4)])
def test_a_newcomer_has_the_newest_state_wherever_it_lies(network: Network, near: int, far: int, counts: int) -> None:
    first, second = network.worker(0), network.worker(1)
    first.leaves(4)
    if far >= 0:
        first.leaves(far, slot=2)
    if near >= 0:
        second.leaves(near, slot=2)
    newcomer = network.worker(7, machine=1)
    network.view(0, 1)
    assert newcomer.copies.claim([2]) == 2
    newcomer.copies.bring(2, drops=False)
    assert newcomer.has(2) == second.has(2) == counts


def test_one_that_died_before_it_had_left_any_begins_as_all_others_did(network: Network) -> None:
    network.worker(0).leaves(0)
    newcomer = network.worker(7, machine=1)
    network.view(0)
    newcomer.copies.claim([1])
    newcomer.copies.bring(1, drops=False)
    assert newcomer.has(1) == 0


@pytest.mark.parametrize(("left", "words"), [(2, "behind exchange 2"), (-1, "none")])
def test_a_state_that_nobody_can_go_on_from_ends_the_run_and_says_why(network: Network, left: int, words: str) -> None:
    first = network.worker(0)
    first.leaves(4)
    if left >= 0:
        first.leaves(left, slot=1)
    newcomer = network.worker(7, machine=1)
    network.view(0)
    newcomer.copies.claim([1])
    with pytest.raises(PacelineError, match=rf"replica 1 was lost: its newest state that is left is .*{words}"):
        newcomer.copies.bring(1, drops=False)


def test_where_replicas_are_dropped_a_newcomer_has_the_state_of_one_who_went_on_too(network: Network) -> None:
    first = network.worker(0)
    first.leaves(9)
    first.leaves(2, slot=1)
    newcomer = network.worker(7, machine=1)
    network.view(0)
    newcomer.copies.claim([1])
    newcomer.copies.bring(1, drops=True)
    assert newcomer.has(1) == 2 and newcomer.has(0) == 9


def test_a_changed_byte_is_seen(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for what was sent, and comes again."""
    first, second = network.worker(0), network.worker(1)
    network.view(0, 1)
    plain, changed = Passage.take, threading.Event()

    def take(passage: Passage, stretch: memoryview) -> None:
        plain(passage, stretch)
        if not changed.is_set() and len(stretch) > 100:
            stretch[50] ^= 1
            changed.set()

    monkeypatch.setattr(Passage, "take", take)
    first.offers(3)
    first.copies.wait()
    assert changed.is_set() and second.has(0) == 3
