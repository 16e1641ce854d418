"""What workers at their own pace keep: whoever dies between any two words, what was sent and what is kept are what was given."""

from __future__ import annotations

import os
from collections.abc import Generator

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.servers.register import AGAIN, Register
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.feedback import send
from paceline.tensors.codecs.seats import Seats
from tests.tensors.arithmetic import same

SHAPES = [(3, 4), (9,)]
SIZE, NUMBER = 21, 3
CODEC = parse("topk:0.2")  # whole numbers stay whole: every sum is exact


class Locks:
    """Of one worker, among those of all."""

    def __init__(self, holders: dict[int, int], worker: int) -> None:
        self._holders, self._worker = holders, worker

    def take(self, seat: int) -> bool:
        return self._holders.setdefault(seat, self._worker) == self._worker

    def release(self, seat: int) -> None:
        del self._holders[seat]


class Workers(RuleBasedStateMachine):
    """Each push goes in moments, and between any two of them its worker may die."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("seats")
        self.memory = self._mapped()
        self.holders: dict[int, int] = {}
        self.register = Register(slots=1)
        self.register.begin(0, 10_000)
        self.all = [self.memory]
        self.seats: dict[int, Seats] = {}
        self.pushing: dict[int, Generator[None]] = {}
        self.pushes: dict[int, int] = {}
        self.sent, self.given = torch.zeros(SIZE), torch.zeros(SIZE)
        self.newest = -1

    def _mapped(self) -> Seats:
        def allocate(name: str, size: int) -> int:
            os.ftruncate(self.fd, size)
            return os.dup(self.fd)

        return Seats(CODEC, SHAPES, NUMBER, allocate)

    def teardown(self) -> None:
        for seats in self.all:
            seats.close()
        os.close(self.fd)

    def had(self, worker: int, own: int) -> bool:
        assert worker not in self.seats, "it is asked of those who are dead"
        self.register.lose(worker)
        return self.register.counted(worker, own)

    @precondition(lambda self: len(self.seats) < NUMBER)
    @rule()
    def come(self) -> None:
        self.newest += 1
        self.register.enter(self.newest)
        seats = self._mapped()
        self.all.append(seats)
        seats.locks = Locks(self.holders, self.newest)
        if seats.sit(self.had):
            self.seats[self.newest], self.pushes[self.newest] = seats, 0
        else:
            assert set(self.holders.values()) <= set(self.seats), "a seat that nobody has is free"

    @precondition(lambda self: set(self.seats) - set(self.pushing))
    @rule(data=st.data(), seed=st.integers(0, 1 << 20), counts=st.booleans())
    def push(self, data: st.DataObject, seed: int, counts: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(set(self.seats) - set(self.pushing))))
        self.pushes[worker] += 1
        self.pushing[worker] = self._push(worker, self.pushes[worker], seed, counts)

    def _push(self, worker: int, own: int, seed: int, counts: bool) -> Generator[None]:
        seats = self.seats[worker]
        gradient = torch.randint(-50, 50, (SIZE,), generator=torch.Generator().manual_seed(seed)).float()
        old = seats.old(self.had)
        yield
        new = seats.new()
        new.fill_(1e6)  # half written
        yield
        message = send(CODEC, gradient.clone(), SHAPES, seed, old, new)
        yield
        seats.put(worker, own)
        yield
        number = self.register.fresh
        self.register.fresh += 1
        if not counts:  # another worker's push of the same micro-batch was before it
            self.register.calls[number] = 1
        counted = self.register.push(worker, own, number, 0, b"") != AGAIN
        if counted:
            decoded = torch.empty(SIZE)
            CODEC.decode(message, SHAPES, seed, decoded)
            self.sent += decoded
            self.given += gradient
        yield
        seats.decide(counted)

    @precondition(lambda self: self.pushing)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.pushing)))
        if next(self.pushing[worker], "over") == "over":
            del self.pushing[worker]

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.seats)))
        self.pushing.pop(worker, None)
        del self.seats[worker]
        for seat in [seat for seat, holder in self.holders.items() if holder == worker]:
            del self.holders[seat]

    @rule(fewer=st.booleans())
    def all_begin_anew_from_a_checkpoint(self, fewer: bool) -> None:
        rows = self.memory.capture(self.register.counted)
        self.seats, self.pushing, self.holders = {}, {}, {}
        self.register = self.register.at_rest()
        if fewer:
            one = Seats(CODEC, SHAPES, 1, None)
            one.lay(rows)
            rows = one.capture(self.register.counted)
        self.memory.lay(rows)

    @invariant()
    def nothing_is_lost_and_nothing_counts_twice(self) -> None:
        kept = sum((row[:SIZE] for row in self.memory.capture(self.register.counted)), torch.zeros(SIZE))
        assert torch.equal(self.sent + kept, self.given)


TestWorkers = Workers.TestCase


def test_seats_of_another_model_do_not_fit() -> None:
    seats = Seats(CODEC, SHAPES, 1, None)
    assert seats.fits([torch.zeros(SIZE)]) and not seats.fits([torch.zeros(SIZE + 1)])
    seats.lay([torch.ones(SIZE)])
    (row,) = seats.capture(lambda worker, own: False)
    assert same(row, torch.ones(SIZE))
