"""Clocks: staleness keeps its bound, and nobody waits for ever while others go on."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import UsageError
from paceline.servers.clocks import (
    Adaptive,
    Async,
    Backup,
    Bounded,
    Clocks,
    Decision,
    Kept,
    Mode,
    Pace,
    Sync,
    doubled,
    extra_steps,
    may_pull,
    parse,
)

modes: st.SearchStrategy[Mode] = st.one_of(
    st.just(Sync()),
    st.just(Async()),
    st.builds(Bounded, st.integers(0, 5)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda it: Adaptive(min(it), max(it))),
    st.builds(Backup, st.integers(1, 3)),
)


@given(modes)
def test_a_mode_is_read_as_it_is_written(mode: Mode) -> None:
    assert parse(str(mode)) == mode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are: ps, async, ssp, dssp, ps\\+backup"),
        ("bsp", "'bsp' is no mode of the servers; there are"),
        ("ps:1", "write ps$"),
        ("async:", "write async$"),
        ("ssp", "write ssp:3, for at most 3 pushes ahead"),
        ("ssp:", "write ssp:3"),
        ("ssp:-1", "write ssp:3"),
        ("ssp:1.5", "write ssp:3"),
        ("ssp: 3", "write ssp:3"),
        ("ssp:³", "write ssp:3"),
        ("ssp:1,2", "write ssp:3"),
        ("dssp:3", "write dssp:1,8"),
        ("dssp:8,1", "the wrong way round; write dssp:1,8"),
        ("dssp:1,8,9", "write dssp:1,8"),
        ("ps+backup", "write ps\\+backup:1"),
        ("ps+backup:0", "computes nothing twice; write ps, or"),
    ],
)
def test_nonsense_is_refused_with_the_line_to_write(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("mode", "clocks", "want"),
    [
        (Sync(), {0: 5, 1: 5}, Decision(True, "nobody is behind")),
        (Sync(), {0: 5, 1: 4}, Decision(False, "worker 1 is 1 push behind, and ps allows none", 1)),
        (Async(), {0: 99, 1: 0}, Decision(True, "async waits for nobody")),
        (Bounded(3), {0: 5, 1: 2, 2: 4}, Decision(True, "worker 1 is 3 pushes behind, and ssp:3 allows 3")),
        (Bounded(3), {0: 6, 1: 2, 2: 4}, Decision(False, "worker 1 is 4 pushes behind, and ssp:3 allows 3", 1)),
        (Adaptive(1, 8), {0: 4, 1: 2}, Decision(False, "worker 1 is 2 pushes behind, and dssp:1,8 allows 1", 1)),
        (
            Backup(1),
            {0: 3, 1: 2, 2: 3},
            Decision(True, "1 worker is behind, worker 1 most, and ps+backup:1 has 1 computed twice"),
        ),
        (
            Backup(1),
            {0: 3, 1: 2, 2: 1},
            Decision(False, "2 workers are behind, worker 2 most, and ps+backup:1 has 1 computed twice", 2),
        ),
    ],
)
def test_a_decision_says_why_and_on_whom_it_waits(mode: Mode, clocks: Mapping[int, int], want: Decision) -> None:
    assert may_pull(mode, clocks, 0) == want


def test_who_was_let_go_ahead_goes_to_the_upper_bound_and_no_further() -> None:
    assert may_pull(Adaptive(1, 8), {0: 10, 1: 2}, 0, until=11).go
    assert not may_pull(Adaptive(1, 8), {0: 10, 1: 2}, 0, until=10).go
    assert not may_pull(Adaptive(1, 8), {0: 11, 1: 2}, 0, until=99).go


def test_a_dead_worker_holds_nobody_up_and_a_newcomer_begins_with_the_slowest() -> None:
    clocks = Clocks(Bounded(1))
    for worker in (0, 1, 2):
        assert clocks.join(worker) == 0
    for clock in (1, 2):
        clocks.push(0, clock, now=clock)
    clocks.push(1, 1, now=3.0)
    assert clocks.pull(0, 4.0) == Decision(False, "worker 2 is 2 pushes behind, and ssp:1 allows 1", 2)
    clocks.leave(2)
    assert clocks.pull(0, 4.0).go
    assert clocks.join(3) == 1
    clocks.leave(0)
    clocks.leave(1)
    clocks.leave(3)
    assert clocks.join(4) == 1, "where they were, though nobody is left"


def test_a_push_that_is_told_twice_and_a_pull_that_is_asked_twice_count_once() -> None:
    clocks = Clocks(Async())
    clocks.join(0)
    clocks.push(0, 1, 1.0)
    clocks.push(0, 1, 2.0)
    assert clocks.kept.clocks == {0: 1}
    assert clocks.pull(0, 3.0).go
    assert clocks.pull(0, 3.5).go
    assert clocks.kept.staleness == {0: 1}


def test_who_has_left_neither_pulls_nor_comes_back_by_a_late_push() -> None:
    clocks = Clocks(Async())
    clocks.join(0)
    clocks.join(1)
    clocks.leave(1)
    clocks.push(1, 5, 1.0)
    assert clocks.kept.clocks == {0: 0}
    assert clocks.pull(1, 2.0) == Decision(False, "worker 1 is not among those who train")


def test_what_a_backup_is_told_is_enough_to_go_on() -> None:
    clocks = Clocks(Bounded(2))
    for worker in (0, 1):
        clocks.join(worker)
    clocks.push(0, 1, 1.0)
    clocks.push(0, 2, 2.0)
    clocks.pull(0, 3.0)
    heir = Clocks(Bounded(2), msgspec.msgpack.decode(msgspec.msgpack.encode(clocks.kept), type=Kept))
    assert heir.kept == clocks.kept == Kept({0: 2, 1: 0}, 0, {2: 1})
    heir.push(0, 3, 0.5)
    assert not heir.pull(0, 0.6).go


paces = st.tuples(st.floats(0, 100), st.floats(0.01, 50))


@given(paces, paces, st.floats(100, 200), st.integers(0, 8))
def test_no_other_number_of_extra_steps_would_wait_less(
    fast: tuple[float, float], slow: tuple[float, float], now: float, most: int
) -> None:
    chosen = extra_steps(Pace(*fast), Pace(*slow), now, most)
    assert 0 <= chosen <= most

    def wait(steps: int) -> float:
        at, due = now + steps * fast[1], max(sum(slow), now)
        while due < at - 1e-9:
            due += slow[1]
        return due - at

    assert wait(chosen) <= min(map(wait, range(most + 1))) + 1e-6


def test_without_a_known_pace_nobody_is_sent_ahead() -> None:
    assert extra_steps(Pace(1.0), Pace(1.0, 5.0), 2.0, most=5) == 0
    assert extra_steps(Pace(1.0, 1.0), Pace(1.0), 2.0, most=5) == 0


class Training(RuleBasedStateMachine):
    """Workers pull, compute and push in any order, come and die; the clocks also move to another server."""

    @initialize(mode=modes, workers=st.integers(1, 4))
    def begin(self, mode: Mode, workers: int) -> None:
        self.mode, self.now, self.next = mode, 0.0, workers
        self.clocks = Clocks(mode)
        self.computing: dict[int, bool] = {}
        for worker in range(workers):
            assert self.clocks.join(worker) == 0
            self.computing[worker] = False
        self.floor = 0

    @rule(seconds=st.floats(0.01, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: any(not busy for busy in self.computing.values()))
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, busy in self.computing.items() if not busy]))
        clocks = dict(self.clocks.kept.clocks)
        stale = clocks[worker] - min(clocks.values())
        before = dict(self.clocks.kept.staleness)
        decision = self.clocks.pull(worker, self.now)
        if decision.go:
            self.computing[worker] = True
            assert self.clocks.kept.staleness == before | {stale: before.get(stale, 0) + 1}
        else:
            assert self.clocks.kept.staleness == before
            assert decision.waits_for is not None
            assert clocks[decision.waits_for] == min(clocks.values()), "it waits for who is slowest"
        match self.mode:
            case Sync():
                assert decision.go == (stale == 0)
            case Async():
                assert decision.go
            case Bounded(most):
                assert decision.go == (stale <= most)
            case Adaptive(low, high):
                assert decision.go or stale > low
                assert not decision.go or stale <= high
            case Backup(slots):
                assert decision.go == (sum(clock < clocks[worker] for clock in clocks.values()) <= slots)

    @precondition(lambda self: any(self.computing.values()))
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def push(self, data: st.DataObject, seconds: float) -> None:
        worker = data.draw(st.sampled_from([worker for worker, busy in self.computing.items() if busy]))
        self.now += seconds
        self.clocks.push(worker, self.clocks.kept.clocks[worker] + 1, self.now)
        self.computing[worker] = False

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.computing)))
        del self.computing[worker]
        self.clocks.leave(worker)

    @rule()
    def join(self) -> None:
        if len(self.computing) < 5:
            assert self.clocks.join(self.next) == self.floor
            self.computing[self.next] = False
            self.next += 1

    @rule()
    def fail_over(self) -> None:
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(self.clocks.kept), type=Kept)
        self.clocks = Clocks(self.mode, kept)
        self.now = 0.0

    @invariant()
    def the_slowest_may_go_and_the_smallest_clock_never_falls(self) -> None:
        kept = self.clocks.kept
        assert kept.clocks.keys() == self.computing.keys()
        assert self.clocks.slowest >= self.floor
        self.floor = self.clocks.slowest
        for worker, clock in kept.clocks.items():
            if clock == self.floor:
                assert may_pull(self.mode, kept.clocks, worker).go

    @invariant()
    def staleness_keeps_its_bound(self) -> None:
        match self.mode:
            case Sync():
                assert max(self.clocks.kept.staleness, default=0) == 0
            case Bounded(most) | Adaptive(_, most):
                assert max(self.clocks.kept.staleness, default=0) <= most
            case _:
                pass


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=150, stateful_step_count=40)


def simulate(mode: Mode, seconds: Mapping[int, Callable[[], float]], until: float) -> Clocks:
    """Training in virtual time: pushes take none, a worker that may not pull asks again at the next push."""
    clocks = Clocks(mode)
    ends: list[tuple[float, int]] = []
    waiting = set(seconds)
    for worker in seconds:
        clocks.join(worker)
    now = 0.0
    while now < until:
        for worker in sorted(waiting):
            if clocks.pull(worker, now).go:
                waiting.remove(worker)
                heapq.heappush(ends, (now + seconds[worker](), worker))
        assert ends, "nobody goes on"
        now, worker = heapq.heappop(ends)
        clocks.push(worker, clocks.kept.clocks[worker] + 1, now)
        waiting.add(worker)
    return clocks


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


ONE_SLOW: dict[int, Callable[[], float]] = {0: steady(1.0), 1: steady(1.0), 2: steady(1.0), 3: steady(4.0)}


def test_with_one_worker_slow_for_ever_only_async_is_faster_in_the_long_run() -> None:
    """A bound on staleness lets the others go ahead by it once: then they go at the pace of the slowest."""
    pushes = {
        text: sum(simulate(parse(text), ONE_SLOW, 400.0).kept.clocks.values())
        for text in ("ps", "ssp:4", "dssp:1,4", "async")
    }
    assert pushes["async"] > 3.2 * pushes["ps"]
    assert pushes["ps"] < pushes["dssp:1,4"] <= pushes["ssp:4"] < 1.05 * pushes["ps"]


def jittery(seed: int) -> dict[int, Callable[[], float]]:
    """All are equally fast, but now and then one takes four times as long."""
    random = Random(seed)
    return dict.fromkeys(range(4), lambda: 4.0 if random.random() < 0.15 else 1.0)


def test_with_now_one_slow_and_now_another_a_bound_is_nearly_as_fast_as_none() -> None:
    pushes = {
        text: sum(simulate(parse(text), jittery(7), 2000.0).kept.clocks.values())
        for text in ("ps", "ssp:4", "dssp:1,8", "async")
    }
    assert pushes["ps"] < 0.75 * pushes["async"]
    assert pushes["ssp:4"] > 0.87 * pushes["async"]
    assert pushes["dssp:1,8"] > 0.87 * pushes["async"]


def test_dssp_is_about_as_fast_as_its_upper_bound_and_less_stale() -> None:
    def mean(kept: Kept) -> float:
        return sum(stale * pulls for stale, pulls in kept.staleness.items()) / sum(kept.staleness.values())

    adaptive, low, high = (simulate(parse(text), jittery(11), 3000.0).kept for text in ("dssp:1,8", "ssp:1", "ssp:8"))
    pushes = [sum(kept.clocks.values()) for kept in (low, adaptive, high)]
    assert pushes[0] < pushes[1] <= 1.01 * pushes[2]
    assert mean(low) < mean(adaptive) < mean(high)


@pytest.mark.parametrize(
    ("slots", "seconds", "carried", "want"),
    [
        (1, {0: 1.0, 1: 1.0, 2: 1.0, 3: 4.0}, {0: [0], 1: [1], 2: [2], 3: [3]}, {0: (3,)}),
        (2, {0: 1.0, 1: 1.0, 2: 9.0, 3: 4.0}, {0: [0], 1: [1], 2: [2], 3: [3]}, {0: (2,), 1: (3,)}),
        (2, {0: 1.0, 1: 5.0}, {0: [0, 1], 1: [2, 3]}, {0: (3, 2)}),
        (1, {0: 1.0, 1: 1.5}, {0: [0], 1: [1]}, {}),
        (3, {0: 1.0}, {0: [0, 1]}, {}),
    ],
    ids=["one slow", "two slow", "several slots each", "not worth it", "nobody else"],
)
def test_early_workers_also_compute_what_is_expected_last(
    slots: int, seconds: dict[int, float], carried: dict[int, list[int]], want: dict[int, tuple[int, ...]]
) -> None:
    assert doubled(Backup(slots), seconds, carried) == want


@given(st.dictionaries(st.integers(0, 6), st.floats(0.1, 10), min_size=1), st.integers(1, 5), st.data())
def test_what_is_computed_twice_is_there_sooner(seconds: dict[int, float], slots: int, data: st.DataObject) -> None:
    counts = {worker: data.draw(st.integers(1, 3)) for worker in seconds}
    numbers = iter(range(100))
    carried = {worker: [next(numbers) for _ in range(count)] for worker, count in counts.items()}
    extra = doubled(Backup(slots), seconds, carried)
    taken = [slot for own in extra.values() for slot in own]
    assert len(taken) == len({*taken}) <= slots
    for helper, own in extra.items():
        for nth, slot in enumerate(own, 1):
            owner = next(worker for worker, carries in carried.items() if slot in carries)
            assert owner != helper
            late = (carried[owner].index(slot) + 1) * seconds[owner]
            assert (counts[helper] + nth) * seconds[helper] < late
