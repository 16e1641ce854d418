"""The register: whatever dies when, each micro-batch is done once, each push counted once, in one order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.servers.register import AGAIN, Delivered, Register

SLOTS, TOTAL = 3, 14


class Workers(RuleBasedStateMachine):
    """Workers that take, push (twice each), finish, say things again and die; a register that is written and read, or goes
    over to a new life from a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register = Register(SLOTS)
        self.alive: dict[int, int] = {}
        """By worker, its pushes so far."""
        self.in_hand: dict[int, tuple[int, int]] = {}
        """By worker, the micro-batch in hand and its pushes that are made."""
        self.counted: list[tuple[int, int]] = []
        self.finished: list[int] = []
        self.newest = -1
        self.register.begin(0, TOTAL)

    def _some(self, data: st.DataObject, among: object) -> int:
        return data.draw(st.sampled_from(sorted(among)))  # type: ignore[call-overload,no-any-return]

    @precondition(lambda self: len(self.alive) < 4)
    @rule()
    def come(self) -> None:
        self.newest += 1
        self.alive[self.newest] = 0
        self.register.begin(0, TOTAL)
        self.register.enter(self.newest)

    @precondition(lambda self: set(self.alive) - set(self.in_hand))
    @rule(data=st.data(), want=st.integers(1, 3))
    def take(self, data: st.DataObject, want: int) -> None:
        worker = self._some(data, set(self.alive) - set(self.in_hand))
        numbers = self.register.lease(worker, want)
        assert self.register.lease(worker, want) == numbers
        if numbers:
            self.in_hand[worker] = numbers[0], 0

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data(), again=st.booleans())
    def push(self, data: st.DataObject, again: bool) -> None:
        worker = self._some(data, self.in_hand)
        number, call = self.in_hand[worker]
        if call == 2:
            return
        self.alive[worker] += 1
        before = self.register.count
        count = self.register.push(worker, self.alive[worker], number, call, b"%d" % number)
        if again:
            assert self.register.push(worker, self.alive[worker], number, call, b"%d" % number) == count
        self.in_hand[worker] = number, call + 1
        assert (count == AGAIN) == ((number, call) in self.counted)
        if count != AGAIN:
            assert count == before + 1 == self.register.log[-1].count
            self.counted.append((number, call))

    @precondition(lambda self: any(call == 2 for _, call in self.in_hand.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        worker = self._some(data, (k for k, (_, call) in self.in_hand.items() if call == 2))
        number, _ = self.in_hand.pop(worker)
        self.register.finish(worker, [Delivered(number, 2, 1, number)])
        self.register.finish(worker, [Delivered(number, 2, 1, number)])
        self.finished.append(number)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = self._some(data, self.alive)
        del self.alive[worker]
        self.in_hand.pop(worker, None)
        self.register.lose(worker)
        self.register.lose(worker)
        assert self.register.push(worker, 99, 0, 0, b"") == AGAIN, "it comes too late"

    @rule(heard=st.integers(0, 30), written=st.integers(0, 5))
    def hear(self, heard: int, written: int) -> None:
        self.register.heard(min(heard, self.register.count))
        self.register.written(written)

    @rule()
    def fail_over(self) -> None:
        self.register = Register.decode(self.register.encode())

    @rule()
    def resume(self) -> None:
        self.register = Register.decode(self.register.at_rest().encode())
        self.alive, self.in_hand = {}, {}
        self.newest = -1

    @invariant()
    def each_once(self) -> None:
        register = self.register
        assert sorted(self.finished) == sorted(set(self.finished))
        assert len(self.counted) == len(set(self.counted)) == register.count
        held = [number for mine in register.held.values() for number in mine]
        untouched = [*range(register.fresh, TOTAL), *register.back, *held]
        assert sorted([*untouched, *self.finished]) == list(range(TOTAL)), "nothing is lost, nothing is given twice"
        assert register.samples == 2 * len(self.finished)
        whole = next(k for k in range(TOTAL) if k not in self.finished) // SLOTS if len(self.finished) < TOTAL else 4
        assert register.steps == whole
        assert register.over == (len(self.finished) == TOTAL)


TestWorkers = Workers.TestCase


def test_who_stops_gives_back_what_it_has_and_the_rest_finish_theirs() -> None:
    register = Register(1)
    register.begin(0, 9)
    for worker in (0, 1):
        register.enter(worker)
        register.lease(worker, 2)
    register.stop = 5
    register.finish(0, [Delivered(0, 1, 1, 0)])
    register.give_back(0)
    assert not register.over and register.lease(0, 1) == []
    register.finish(1, [Delivered(2, 1, 1, 2)])
    register.give_back(1)
    assert register.over and register.back == [1, 3]


def test_a_micro_batch_that_is_none_is_refused() -> None:
    register = Register(1)
    register.begin(0, 3)
    with pytest.raises(ValueError, match="micro-batch 3 of a stretch of 3"):
        register.finish(0, [Delivered(3, 1, 1, 0)])
    register.enter(0)
    register.push(0, 2, 0, 0, b"")
    with pytest.raises(ValueError, match="push 1 of worker 0, which has made 2"):
        register.push(0, 1, 0, 0, b"")


def in_another_life(done: int, held: int, pushed: bool) -> Register:
    """A stretch of 100 steps with so many micro-batches done, and so many in hand when its life ended."""
    register = Register(2)
    register.begin(1, 200)
    register.enter(0)
    numbers = register.lease(0, done + held)[:]
    register.finish(0, [Delivered(number, 1, 1, number) for number in numbers[:done]])
    if pushed:
        register.push(0, 1, numbers[-1], 0, b"")
    return Register.decode(register.at_rest().encode())


@pytest.mark.parametrize(
    ("held", "pushed", "last", "total"),
    [
        (0, False, 15, 30),
        (4, False, 15, 30),
        (4, False, 11, 22),
        (4, False, 10, 20),
        (4, True, 11, 24),  # a push of the last one is counted: it is finished
        (0, False, 8, 20),
        (0, False, 300, 200),
        (0, False, 0, 200),
    ],
)
def test_a_resumed_stretch_ends_where_its_limit_is_now(held: int, pushed: bool, last: int, total: int) -> None:
    register = in_another_life(20, held, pushed)
    for worker in (0, 1):
        register.begin(1, 200, last=last)
        register.enter(worker)
        assert register.total == total
    left = register.lease(1, 200)[:]
    assert left == list(range(20, total))
    register.finish(1, [Delivered(number, 1, 1, number) for number in left])
    assert register.over and register.steps == total // 2
