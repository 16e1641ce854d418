"""Workers on several machines, killed at any moment: those who remain come to the bits of an undisturbed run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from paceline.tensors.remembering import Past
from paceline.worker.terms import Terms
from tests.several import training
from tests.several.training import Result, Script, live, undisturbed
from tests.several.world import Fault, World

reference = lru_cache(undisturbed)
NO_PACE: Mapping[Any, float] = {}
BATCH = 10
"""Seeds a test."""
ROUNDS = int(os.environ.get("ROUNDS", "1"))
"""How many times as many seeds, where faults come at any moment: `make rehearse` takes three."""


def seeds(start: int, batches: int = 2, batch: int = BATCH) -> list[Any]:
    """The first one of every batch. `make test` has one batch; the others are more of the same."""
    first, *more = range(start, start + ROUNDS * batches * batch, batch)
    return [first, *(pytest.param(seed, marks=pytest.mark.long) for seed in more)]


@lru_cache
def length(script: Script, workers: int) -> int:
    """Events of a run in which nothing goes wrong."""
    return simulate(script, workers, 0, 0, []).events


def simulate(
    script: Script, workers: int, starts: int, seed: int, faults: Iterable[Fault], pace: Mapping[Any, float] = NO_PACE
) -> World:
    """Run it, and compare what those who remain have with the undisturbed run."""
    results: dict[int, Result] = {}
    world = World(workers, starts, seed, live(script, results), list(faults), dict(pace))
    want = reference(script)
    try:
        world.run()
        assert any(actor.lingers for actor in world.actors.values())
        for number, got in results.items():
            assert got.weights == want.weights, f"worker {number} has other weights"
            assert got.delivered == {step: want.delivered[step] for step in got.delivered}, (
                "a share was not counted once"
            )
            assert got.evaluated == {step: want.evaluated[step] for step in got.evaluated}
    except BaseException as error:
        error.add_note(
            f"{script}, {workers} workers, {starts} starts, seed {seed}, {faults}\n" + "\n".join(world.story)
        )
        raise
    return world


def joined(world: World) -> list[int]:
    """Newcomers that have come in, and are there."""
    return [member for member in world.journal.membership.settled.members if member >= world.workers]


def left(world: World) -> list[int]:
    """Who has gone as agreed."""
    return [number for number, actor in world.actors.items() if actor.left]


def drawn(
    seed: int,
    deaths: int = 0,
    leaves: int = 0,
    starts: int = 0,
    steps: tuple[int, int] = (2, 4),
    hands_over: bool = False,
) -> World:
    """A run of this seed, with faults at any moment of it."""
    draw = random.Random(seed)
    script, workers = replace(Script.drawn(draw, *steps), hands_over=hands_over), draw.randint(2, 5)
    whole = length(script, workers)
    faults = [Fault(draw.randrange(whole), kind) for kind in ["kill"] * deaths + ["leave"] * leaves]
    return simulate(script, workers, starts, seed, faults)


def test_with_nothing_lost() -> None:
    for workers in (1, 2, 3):
        world = simulate(Script(evaluates=True, sparse=True, points=(4, 6)), workers, 0, workers, [])
        assert not world.journal.after


@pytest.mark.parametrize("first", seeds(0))
def test_one_is_killed(first: int) -> None:
    worlds = [drawn(seed, deaths=1) for seed in range(first, first + BATCH)]
    assert all(len(world.journal.after) == 1 for world in worlds)


@pytest.mark.parametrize("first", seeds(1000))
def test_several_are_killed(first: int) -> None:
    worlds = [drawn(seed, deaths=3) for seed in range(first, first + BATCH)]
    assert all(world.journal.after for world in worlds)
    assert any(len(world.journal.after) == 3 for world in worlds)


@pytest.mark.parametrize("first", seeds(2000))
def test_the_killed_are_replaced(first: int) -> None:
    worlds = [drawn(seed, deaths=2, starts=3, steps=(8, 12)) for seed in range(first, first + BATCH)]
    assert all(world.journal.after for world in worlds)
    assert any(joined(world) for world in worlds)


@pytest.mark.parametrize("first", seeds(3000, batches=3))
def test_some_are_killed_some_leave_some_join(first: int) -> None:
    worlds = [drawn(seed, deaths=2, leaves=2, starts=3, steps=(2, 12)) for seed in range(first, first + BATCH)]
    assert any(world.journal.after and left(world) and joined(world) for world in worlds)


@pytest.mark.parametrize("first", seeds(4000, batches=3))
def test_the_same_where_newcomers_are_handed_the_state(first: int) -> None:
    worlds = [
        drawn(seed, deaths=2, leaves=1, starts=4, steps=(8, 12), hands_over=True)
        for seed in range(first, first + BATCH)
    ]
    assert any(joined(world) for world in worlds)


HANDED = {
    "it is ready": "is ready",
    "it waits to be let in": "waits to be let in",
    "building the group with it": "hello in term 3",
    "saying how far": "('say', 1) in term 3",
    "the state comes": "('trade', 2) in term 3",
    "all know that it is there": "('say', 3) in term 3",
    "it is healed": "is healed",
    "its first point": "('lanes', 4) in term 3",
}


@pytest.mark.parametrize("moment", HANDED.values(), ids=HANDED)
def test_moments_of_a_join_where_the_state_is_handed_over(moment: str) -> None:
    faults = [Fault("sums in term 1"), Fault(moment)]
    worlds = [simulate(Script(steps=16, hands_over=True), 3, 3, seed, faults) for seed in range(BATCH)]
    assert sum(not world.faults for world in worlds) > BATCH // 2, "that moment hardly came"


MOMENTS = {
    "building the first group": ["hello in term 1"],
    "the first word": ["('say', 1) in term 1"],
    "the first meeting": ["('say', 2) in term 1"],
    "the first point": ["('lanes', 3) in term 1"],
    "an evaluation": ["('say', 4) in term 1"],
    "two at once": ["sums in term 1", "sums in term 1"],
    "building the next group": ["sums in term 1", "hello in term 2"],
    "saying how far": ["sums in term 1", "('say', 1) in term 2"],
    "shipping": ["sums in term 1", "('say', 2) in term 2"],
    "carrying on": ["('lanes', 5) in term 1", "sums in term 2"],
    "one death after the other": ["parts in term 1", "hello in term 2", "hello in term 3"],
}
JOINS = {
    "a newcomer waits for the state": "waits for the state",
    "it follows": "follows",
    "it is near": "is near",
    "building the group with it": "hello in term 3",
    "saying how far": "('say', 1) in term 3",
    "it is healed": "is healed",
    "its first point": "('lanes', 2) in term 3",
}


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
def test_moments_of_a_death(moments: list[str]) -> None:
    worlds = [simulate(Script(evaluates=True), 4, 0, seed, map(Fault, moments)) for seed in range(BATCH)]
    assert any(not world.faults for world in worlds), "that moment never came"


@pytest.mark.parametrize("moment", JOINS.values(), ids=JOINS)
def test_moments_of_a_join(moment: str) -> None:
    faults = [Fault("sums in term 1"), Fault(moment)]
    worlds = [simulate(Script(steps=16), 3, 3, seed, faults) for seed in range(BATCH)]
    assert sum(not world.faults for world in worlds) > BATCH // 2, "that moment hardly came"


LEAVER_DIES = [Fault(30, "leave"), Fault("hello in term 2", "kill a leaver")]
TWO_LEAVE = [Fault(20, "leave"), Fault(30, "leave"), Fault("hello in term 2")]
"""After a death the leave of the rest is announced once more, at once."""
SLOW_TO_NOTICE = {"news": 10.0, **{("board", n): 3.0 for n in range(8)}, **{("notices", n): 0.02 for n in range(8)}}


@pytest.mark.parametrize("first", seeds(0))
def test_who_was_to_leave_is_killed(first: int) -> None:
    batch = range(first, first + BATCH)
    one = [simulate(Script(steps=8), 3, 3, seed, LEAVER_DIES, SLOW_TO_NOTICE) for seed in batch]
    assert any(world.journal.after and not left(world) for world in one)
    two = [simulate(Script(steps=8), 4, 3, seed, TWO_LEAVE, SLOW_TO_NOTICE) for seed in batch]
    assert any(world.journal.after and left(world) for world in two)


@pytest.mark.parametrize("deaths", [0, 1])
def test_a_machine_leaves_with_main(deaths: int) -> None:
    """Whoever leads next is told late of everything: deaths and leaves are answered when the others are long on."""
    slow = {"news": 0.02}
    worlds = []
    for seed in range(2 * BATCH):
        moments = random.Random(seed).sample(range(150), 1 + deaths)
        faults = [Fault(min(moments), "leave together"), *map(Fault, sorted(moments)[1:])]
        worlds.append(simulate(Script(steps=8), 4, 0, seed, faults, slow))
    assert sum(left(world) == [0, 1] for world in worlds) > BATCH // 2
    assert deaths == 0 or any(world.journal.after and left(world) for world in worlds)


# what would happen without each of the rules


def breaks(run: Callable[[int], object], seeds: range) -> bool:
    for seed in seeds:
        try:
            run(seed)
        except Exception:  # noqa: BLE001  whichever way it shows: other bits, a mismatch, all waiting
            return True
    return False


def one_death(seed: int) -> None:
    drawn(seed, deaths=1)


def test_the_outcome_must_be_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    missed: Callable[[Any], bool] = Terms._missed

    def unshipped(self: Any) -> bool:
        missed(self)
        return False

    monkeypatch.setattr(Terms, "_missed", unshipped)
    assert breaks(one_death, range(30))


def test_a_point_that_somebody_has_opened_must_be_opened_so_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sync: Callable[..., int] = Past.sync

    def careless(self: Past, *where: Any) -> int:
        sync(self, *where)
        return 0

    monkeypatch.setattr(Past, "sync", careless)
    assert breaks(one_death, range(30))


def test_the_outcome_must_be_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script halves its gradients in place."""

    monkeypatch.setattr(Past, "reduced", Past.complete)
    assert breaks(one_death, range(30))


def test_an_overtaken_worker_must_not_agree_to_another_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: training.Session) -> int:
        return self._world.boards[self.worker].next_term if self._world is not None else 0

    monkeypatch.setattr(training.Session, "next_term", property(hasty))
    slow = {**SLOW_TO_NOTICE, ("notices", 1): 0.3}
    assert breaks(lambda seed: simulate(Script(steps=8), 4, 3, seed, TWO_LEAVE, slow), range(60))


# loops without run.slots()


def flat(seed: int, deaths: int, leaves: int = 0, hands_over: bool = False) -> World:
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    script = Script(draw.randint(2, 5), (workers,), draw.random() < 0.5, draw.random() < 0.4, hands_over, flat=True)
    whole = length(script, workers)
    faults = [Fault(draw.randrange(whole), kind) for kind in ["kill"] * deaths + ["leave"] * leaves]
    return simulate(script, workers, 12, seed, faults)


FLAT_JOINS = {
    "they wait": "waits for others in 2",
    "a newcomer waits for word": "waits for the state",
    "all have seen it": "('say', 2) in term 2",
    "building the group with it": "hello in term 3",
    "saying how far": "('say', 1) in term 3",
    "the state comes": "('trade', 2) in term 3",
    "all know that it is there": "('say', 3) in term 3",
    "it is healed": "is healed",
    "the point that was in hand": "('lanes', 4) in term 3",
}


@pytest.mark.parametrize("moment", FLAT_JOINS.values(), ids=FLAT_JOINS)
def test_moments_of_a_join_in_a_flat_loop(moment: str) -> None:
    faults = [Fault("sums in term 1"), Fault(moment)]
    worlds = [simulate(Script(flat=True, points=(3,)), 3, 9, seed, faults) for seed in range(BATCH)]
    assert sum(not world.faults for world in worlds) > BATCH // 2, "that moment hardly came"


@pytest.mark.parametrize("hands_over", [False, True])
@pytest.mark.parametrize("first", seeds(5000))
def test_a_flat_loop_waits_for_a_newcomer_wherever_its_workers_are(first: int, hands_over: bool) -> None:
    batch = range(first, first + BATCH)
    one = [flat(seed, 1, hands_over=hands_over) for seed in batch]
    assert sum(len(joined(world)) for world in one) > BATCH // 3
    more = [flat(seed, 3, 1, hands_over) for seed in batch]
    assert any(len(joined(world)) > 1 for world in more)
