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
    RowsBehind,
    Sync,
    behind,
    doubled,
    extra_steps,
    may_pull,
    may_read,
    parse,
)

modes: st.SearchStrategy[Mode] = st.one_of(
    st.just(Sync()),
    st.just(Async()),
    st.builds(Bounded, st.integers(0, 5)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda it: Adaptive(min(it), max(it))),
    st.builds(Backup, st.integers(1, 3)),
    st.builds(RowsBehind, st.integers(0, 3)),
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
        ("ssp", "write ssp:3, for at most 3 steps ahead"),
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
        ("ps+rows", r"write ps\+rows:2, for rows that are read at most 2 updates behind"),
        ("ps+rows:-1", r"write ps\+rows:2"),
        ("ps+rows:1,2", r"write ps\+rows:2"),
        ("central+rows:x", r"write central\+rows:2"),
    ],
)
def test_nonsense_is_refused_with_the_line_to_write(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("mode", "clocks", "want"),
    [
        (Sync(), {0: 5, 1: 5}, Decision(True, "nobody is behind")),
        (Sync(), {0: 5, 1: 4}, Decision(False, "worker 1 is 1 step behind, and ps allows none", 1)),
        (RowsBehind(2), {0: 5, 1: 4}, Decision(False, "worker 1 is 1 step behind, and ps+rows:2 allows none", 1)),
        (Async(), {0: 99, 1: 0}, Decision(True, "async waits for nobody")),
        (Bounded(3), {0: 5, 1: 2, 2: 4}, Decision(True, "worker 1 is 3 steps behind, and ssp:3 allows 3")),
        (Bounded(3), {0: 6, 1: 2, 2: 4}, Decision(False, "worker 1 is 4 steps behind, and ssp:3 allows 3", 1)),
        (Adaptive(1, 8), {0: 4, 1: 2}, Decision(False, "worker 1 is 2 steps behind, and dssp:1,8 allows 1", 1)),
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


counts = st.integers(0, 30)


@given(most=st.integers(0, 5), number=counts, version=counts)
def test_a_read_is_answered_as_soon_as_it_misses_no_more_than_it_may(most: int, number: int, version: int) -> None:
    decision = may_read(most, number, version)
    assert decision.go == (version >= number - most)
    assert not decision.go or 0 <= behind(number, version) <= most
    assert decision.waits_for is None
    if decision.go:  # what may be read now may be read later, and by whoever is allowed more
        assert may_read(most, number, version + 1).go and may_read(most + 1, number, version).go
    assert may_read(0, number, version).go == (behind(number, version) == 0)


def test_a_read_that_waits_says_why() -> None:
    assert may_read(1, 5, 3) == Decision(False, "the rows are 2 updates behind, and 1 is allowed")
    assert may_read(0, 5, 4) == Decision(False, "the rows are 1 update behind, and none is allowed")


def test_who_was_let_go_ahead_goes_to_the_upper_bound_and_no_further() -> None:
    assert may_pull(Adaptive(1, 8), {0: 10, 1: 2}, 0, until=11).go
    assert not may_pull(Adaptive(1, 8), {0: 10, 1: 2}, 0, until=10).go
    assert not may_pull(Adaptive(1, 8), {0: 11, 1: 2}, 0, until=99).go


def test_a_dead_worker_holds_nobody_up_and_neither_does_one_that_has_nothing_in_hand() -> None:
    clocks = Clocks(Bounded(1))
    assert all(clocks.begin(worker, 0, 0.0).go for worker in (0, 1, 2))
    clocks.end(0, 1.0)
    assert clocks.begin(0, 2, 1.0) == Decision(False, "worker 1 is 2 steps behind, and ssp:1 allows 1", 1)
    clocks.end(1, 1.0)
    assert clocks.begin(0, 2, 1.0).waits_for == 2
    clocks.leave(2)
    assert clocks.begin(0, 2, 1.0).go


def test_what_is_taken_in_hand_twice_counts_once() -> None:
    clocks = Clocks(Async())
    assert clocks.begin(0, 4, 3.0).go
    assert clocks.begin(0, 4, 3.5).go
    assert clocks.kept == Kept({0: 4}, {0: 1})


def test_what_a_backup_is_told_is_enough_to_go_on() -> None:
    clocks = Clocks(Bounded(2))
    clocks.begin(1, 0, 1.0)
    clocks.begin(0, 2, 1.0)
    heir = Clocks(Bounded(2), msgspec.msgpack.decode(msgspec.msgpack.encode(clocks.kept), type=Kept))
    assert heir.kept == clocks.kept == Kept({0: 2, 1: 0}, {0: 1, 2: 1})
    heir.end(0, 0.5)
    assert not heir.begin(0, 3, 0.6).go


def seconds(low: int, high: int) -> st.SearchStrategy[float]:
    """Whole 64ths, so that sums and remainders of them are exact."""
    return st.integers(64 * low, 64 * high).map(lambda parts: max(parts, 1) / 64)


paces = st.tuples(seconds(0, 100), seconds(0, 50))


@given(paces, paces, seconds(100, 200), st.integers(0, 8))
def test_no_other_number_of_extra_steps_would_wait_less(
    fast: tuple[float, float], slow: tuple[float, float], now: float, most: int
) -> None:
    chosen = extra_steps(Pace(*fast), Pace(*slow), now, most)
    assert 0 <= chosen <= most

    def wait(steps: int) -> float:
        at, due = now + steps * fast[1], max(sum(slow), now)
        while due < at:
            due += slow[1]
        return due - at

    assert wait(chosen) == min(map(wait, range(most + 1)))


def test_without_a_known_pace_nobody_is_sent_ahead() -> None:
    assert extra_steps(Pace(1.0), Pace(1.0, 5.0), 2.0, most=5) == 0
    assert extra_steps(Pace(1.0, 1.0), Pace(1.0), 2.0, most=5) == 0


class Training(RuleBasedStateMachine):
    """Workers take things of growing clocks, or older ones that were given back, and do them in any order; they die, and the
    clocks move to another server."""

    @initialize(mode=modes)
    def begin(self, mode: Mode) -> None:
        self.mode, self.now, self.clock = mode, 0.0, 0
        self.clocks = Clocks(mode)
        self.computing: dict[int, int] = {}

    @rule(seconds=st.floats(0.01, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker=st.integers(0, 3), older=st.integers(0, 3), further=st.booleans())
    def take(self, worker: int, older: int, further: bool) -> None:
        if worker in self.computing:
            return
        self.clock += further
        mine = max(0, self.clock - older)
        clocks = {**self.computing, worker: mine}
        stale = mine - min(clocks.values())
        before = dict(self.clocks.kept.staleness)
        decision = self.clocks.begin(worker, mine, self.now)
        if decision.go:
            self.computing[worker] = mine
            assert self.clocks.kept.staleness == before | {stale: before.get(stale, 0) + 1}
        else:
            assert self.clocks.kept.staleness == before
            assert decision.waits_for is not None
            assert clocks[decision.waits_for] == min(clocks.values()), "it waits for who is slowest"
        match self.mode:
            case Sync() | RowsBehind():
                assert decision.go == (stale == 0)
            case Async():
                assert decision.go
            case Bounded(most):
                assert decision.go == (stale <= most)
            case Adaptive(low, high):
                assert decision.go or stale > low
                assert not decision.go or stale <= high
            case Backup(slots):
                assert decision.go == (sum(clock < mine for clock in clocks.values()) <= slots)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), seconds=st.floats(0, 5), dies=st.booleans())
    def end(self, data: st.DataObject, seconds: float, dies: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.computing)))
        self.now += seconds
        del self.computing[worker]
        if dies:
            self.clocks.leave(worker)
        else:
            self.clocks.end(worker, self.now)

    @rule()
    def fail_over(self) -> None:
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(self.clocks.kept), type=Kept)
        self.clocks = Clocks(self.mode, kept)
        self.now = 0.0

    @invariant()
    def staleness_keeps_its_bound(self) -> None:
        assert self.clocks.kept.clocks == self.computing
        match self.mode:
            case Sync() | RowsBehind():
                assert max(self.clocks.kept.staleness, default=0) == 0
            case Bounded(most) | Adaptive(_, most):
                assert max(self.clocks.kept.staleness, default=0) <= most
            case _:
                pass


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=150, stateful_step_count=40)


def simulate(mode: Mode, seconds: Mapping[int, Callable[[], float]], until: float) -> tuple[int, Kept]:
    """Training in virtual time, micro-batches handed out in order: how many were done. Pushes take no time; a worker that may
    not go on asks again when another one has done its own."""
    clocks = Clocks(mode)
    ends: list[tuple[float, int]] = []
    waiting = set(seconds)
    held: dict[int, int] = {}
    fresh, done, now = 0, 0, 0.0
    while now < until:
        for worker in sorted(waiting):
            if worker not in held:
                held[worker], fresh = fresh, fresh + 1
            if clocks.begin(worker, held[worker] // len(seconds), now).go:
                waiting.remove(worker)
                heapq.heappush(ends, (now + seconds[worker](), worker))
        assert ends, "nobody goes on"
        now, worker = heapq.heappop(ends)
        clocks.end(worker, now)
        del held[worker]
        done += 1
        waiting.add(worker)
    return done, clocks.kept


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


ONE_SLOW: dict[int, Callable[[], float]] = {0: steady(1.0), 1: steady(1.0), 2: steady(1.0), 3: steady(4.0)}


def test_with_one_worker_slow_for_ever_a_bound_that_covers_its_lag_costs_nothing() -> None:
    """It takes a micro-batch out of every 13: while it has one in hand the others do three steps' worth."""
    done = {text: simulate(parse(text), ONE_SLOW, 400.0)[0] for text in ("ps", "ssp:1", "ssp:4", "dssp:1,4", "async")}
    assert done["async"] > 3.2 * done["ps"]
    assert done["ssp:4"] == done["async"]
    assert done["ps"] < done["ssp:1"] < done["dssp:1,4"] <= done["async"]


def jittery(seed: int) -> dict[int, Callable[[], float]]:
    """All are equally fast, but now and then one takes four times as long."""
    random = Random(seed)
    return dict.fromkeys(range(4), lambda: 4.0 if random.random() < 0.15 else 1.0)


def test_with_now_one_slow_and_now_another_a_bound_is_nearly_as_fast_as_none() -> None:
    done = {text: simulate(parse(text), jittery(7), 2000.0)[0] for text in ("ps", "ssp:4", "dssp:1,8", "async")}
    assert done["ps"] < 0.75 * done["async"]
    assert done["ssp:4"] > 0.97 * done["async"]
    assert done["dssp:1,8"] > 0.85 * done["async"]


def test_dssp_is_faster_than_its_lower_bound_and_less_stale_than_its_upper_one() -> None:
    def mean(kept: Kept) -> float:
        return sum(stale * pulls for stale, pulls in kept.staleness.items()) / sum(kept.staleness.values())

    low, adaptive, high = (simulate(parse(text), jittery(11), 3000.0) for text in ("ssp:0", "dssp:0,8", "ssp:8"))
    assert low[0] < adaptive[0] <= 1.01 * high[0]
    assert mean(low[1]) < mean(adaptive[1]) < mean(high[1])


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
