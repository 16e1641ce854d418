"""Never two that take themselves for the leader, whatever clocks, delays, losses and freezes do."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.election import NOBODY, Silence, Tenure
from paceline.cluster.store import Record

_LEASE_S = 3.0
_PATIENCE_S = 1.5
_DRIFT = 1e-3


def _record(fence: int, beat: int, pid: int = 1) -> Record:
    return Record(fence, pid, "", b"", beat)


def test_a_candidate_waits_a_lease_of_silence() -> None:
    silence = Silence(3.0)
    assert not silence.saw(100.0, 100.4, _record(1, 7)), "counted from the end of the first look"
    assert not silence.saw(103.3, 103.5, _record(1, 7)), "to the beginning of the last"
    assert not silence.saw(104.0, 104.1, _record(1, 8)), "a beat"
    assert not silence.saw(107.0, 108.0, _record(2, 8)), "another leader"
    assert silence.saw(111.0, 111.1, _record(2, 8))


def test_a_candidate_does_not_wait_for_nobody() -> None:
    assert Silence(3.0).saw(100.0, 100.4, _record(2, 7, NOBODY))


def test_a_leader_counts_from_when_it_sent() -> None:
    tenure = Tenure(3.0, sent=10.0)
    assert tenure.holds(12.69) and not tenure.holds(12.71)
    assert not tenure.is_due(10.4) and tenure.is_due(10.6)
    tenure.renew(sent=11.0, now=12.6)
    assert tenure.holds(13.69) and not tenure.holds(13.71)
    tenure.renew(sent=10.5, now=12.6)
    assert tenure.holds(13.69), "an older beat shortens nothing"


def test_a_tenure_that_has_passed_does_not_come_back() -> None:
    tenure = Tenure(3.0, sent=10.0)
    tenure.renew(sent=12.6, now=12.8)
    assert not tenure.holds(12.8), "the answer came too late, though the beat left in time"


# the same among several agents, each with a clock of its own


@dataclass
class World:
    """A store that takes one thing after the other, and messages on their way. Time in here is the true one."""

    draw: random.Random
    now: float = 0.0
    fence: int = 0
    beat: int = 0
    pid: int = 1
    leads: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    coming: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def later(self, after_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.coming, (self.now + after_s, next(self.numbers), what))

    def read(self) -> Record:
        return _record(self.fence, self.beat, self.pid)

    def lead(self, after: int, pid: int = 1) -> bool:
        if self.fence != after:
            return False
        self.fence, self.pid, self.leads = after + 1, pid, self.leads + (pid != NOBODY)
        return True

    def take_beat(self, fence: int) -> bool:
        self.beat += self.fence == fence
        return self.fence == fence


@dataclass
class Line:
    """From one agent to the store: good for a while, then slow, then cut, as it is drawn."""

    world: World
    delay_s: float
    loss: float
    bad: bool = False

    def __post_init__(self) -> None:
        self._turn()

    def _turn(self) -> None:
        self.bad = not self.bad and self.delay_s + self.loss > 0
        self.world.later(self.world.draw.expovariate(1 / (1.5 if self.bad else 5.0)), self._turn)

    def carry(self, what: Callable[[], None]) -> None:
        draw = self.world.draw
        if not self.bad or draw.random() >= self.loss:
            self.world.later(draw.expovariate(1 / self.delay_s) if self.bad and self.delay_s else 0.005, what)

    def ask(self, what: Callable[[], object], heard: Callable[[object], None]) -> None:
        """A question may be lost, and so may its answer; it may be heard long after its sender has given up."""

        def arrive() -> None:
            answer = what()
            self.carry(lambda: heard(answer))

        self.carry(arrive)


class Rules(NamedTuple):
    silence: type[Silence] = Silence
    tenure: type[Tenure] = Tenure
    leaver_acts_on: bool = False


_RIGHT = Rules()


class Agent:
    """Looks, leads, beats, and leaves at times; freezes now and then between any two of these."""

    def __init__(self, line: Line, freeze_s: float, leaves: float, rules: Rules) -> None:
        self._leaves = leaves
        self._world, self._line, self._freeze_s, self._rules = line.world, line, freeze_s, rules
        world = line.world
        self._offset_s, self._speed = world.draw.uniform(-1e5, 1e5), 1 + world.draw.uniform(-_DRIFT, _DRIFT)
        self._asked = 0
        self.fence, self.tenure = 0, None
        self._silence = rules.silence(_LEASE_S)
        self._go(self._look)

    fence: int
    tenure: Tenure | None

    @property
    def clock(self) -> float:
        return self._offset_s + self._world.now * self._speed

    @property
    def leads(self) -> bool:
        return self.tenure is not None and self.tenure.holds(self.clock)

    def _go(self, what: Callable[[], None], after_s: float = 0.0) -> None:
        frozen = self._world.draw.random() < 0.03
        self._world.later(after_s + (self._world.draw.uniform(0, self._freeze_s) if frozen else 0.0), what)

    def _ask(self, what: Callable[[], object], then: Callable[[float, object], None]) -> None:
        """`then` with when it was sent and the answer: None if none came in time."""
        self._asked += 1
        number, sent, over = self._asked, self.clock, [False]

        def heard(answer: object) -> None:
            if not over[0] and number == self._asked:
                over[0] = True
                self._go(lambda: then(sent, answer))

        self._line.ask(what, heard)
        self._world.later(_PATIENCE_S, lambda: heard(None))

    def _look(self) -> None:
        self._ask(self._world.read, self._seen)

    def _seen(self, began: float, record: object) -> None:
        if isinstance(record, Record) and self._silence.saw(began, self.clock, record):
            self._go(
                lambda: self._ask(lambda: self._world.lead(record.fence), lambda s, a: self._led(s, a, record.fence))
            )
        else:
            self._go(self._look, 0.05)

    def _led(self, sent: float, answer: object, after: int) -> None:
        if answer is True:
            self.fence, self.tenure = after + 1, self._rules.tenure(_LEASE_S, sent)
            self._go(self._serve)
        else:
            self._go(self._look)

    def _serve(self) -> None:
        if not self.leads:
            self.tenure, self._silence = None, self._rules.silence(_LEASE_S)
            self._go(self._look)
        elif self._leaves and self._world.draw.random() < self._leaves:
            self._leave()
        elif self.tenure is not None and self.tenure.is_due(self.clock):
            self._ask(lambda: self._world.take_beat(self.fence), self._beaten)
        else:
            self._go(self._serve, 0.1)

    def _leave(self) -> None:
        fence = self.fence
        if not self._rules.leaver_acts_on:
            self.tenure, self._silence = None, self._rules.silence(_LEASE_S)
        self._ask(lambda: self._world.lead(fence, NOBODY), lambda sent, answer: self._serve())

    def _beaten(self, sent: float, answer: object) -> None:
        if answer is True and self.tenure is not None:
            self.tenure.renew(sent, self.clock)
        if answer is False:
            self.tenure = None
        self._go(self._serve, 0.1)


def _live(
    seed: int, agents: int, delay_s: float, loss: float, freeze_s: float, leaves: float = 0.0, rules: Rules = _RIGHT
) -> int:
    """A hundred leases of it; how often the lead was taken. Fails where two have it at once."""
    world = World(random.Random(seed))
    crowd = [Agent(Line(world, delay_s, loss), freeze_s, leaves, rules) for _ in range(agents)]
    while world.now < 100 * _LEASE_S:
        world.now, _, what = heapq.heappop(world.coming)
        what()
        leading = [agent.fence for agent in crowd if agent.leads]
        assert len(leading) <= 1, f"at {world.now:.3f} s the fences {leading} lead"
        assert not leading or max(leading) == world.fence, "whoever acts is the store's leader"
    return world.leads


_WORLDS = {
    "seed": st.integers(0, 2**32),
    "agents": st.integers(2, 5),
    "delay_s": st.sampled_from([0.0, 0.2, 1.0]),
    "loss": st.sampled_from([0.0, 0.1, 0.5]),
    "freeze_s": st.sampled_from([0.0, 2.0, 10.0]),
    "leaves": st.sampled_from([0.0, 0.05]),
}


@given(**_WORLDS)
def test_never_two_within_their_tenure(
    seed: int, agents: int, delay_s: float, loss: float, freeze_s: float, leaves: float
) -> None:
    assert _live(seed, agents, delay_s, loss, freeze_s, leaves) >= 1


def test_where_nothing_fails_one_leads_for_ever() -> None:
    assert _live(seed=1, agents=5, delay_s=0.0, loss=0.0, freeze_s=0.0) == 1


def test_a_leader_that_leaves_is_followed_at_once() -> None:
    """After two seconds on average; a lease is three."""
    assert _live(seed=1, agents=5, delay_s=0.0, loss=0.0, freeze_s=0.0, leaves=0.05) > 100


class _FromTheAnswer(Tenure):
    """Counts from when the answer came: wrong."""

    def renew(self, sent: float, now: float) -> None:
        super().renew(now, now)


class _ComesBack(Tenure):
    """Takes a late answer for a good one: wrong."""

    def renew(self, sent: float, now: float) -> None:
        super().renew(sent, min(now, sent))


class _TooLong(Tenure):
    """Has no margin, but the opposite of one: wrong."""

    def __init__(self, lease_s: float, sent: float) -> None:
        super().__init__(lease_s * 1.2, sent)


class _Hasty(Silence):
    """Counts the looks themselves as silence: wrong."""

    def saw(self, began: float, ended: float, record: Record) -> bool:
        return super().saw(ended, began, record)


@pytest.mark.parametrize(
    "wrong",
    [
        Rules(tenure=_FromTheAnswer),
        Rules(tenure=_ComesBack),
        Rules(tenure=_TooLong),
        Rules(silence=_Hasty),
        Rules(leaver_acts_on=True),
    ],
    ids=["from the answer", "comes back", "too long", "hasty", "acts on"],
)
def test_a_wrong_rule_is_found_out(wrong: Rules) -> None:
    with pytest.raises(AssertionError, match="lead"):
        for seed in range(200):
            _live(seed, agents=3, delay_s=1.0, loss=0.3, freeze_s=2.0, leaves=0.01 * wrong.leaver_acts_on, rules=wrong)
