"""Workers on several machines, killed at any moment: those who remain come to the bits of an undisturbed run."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from tests.several.training import Result, Script, live, undisturbed
from tests.several.world import Fault, World

reference = lru_cache(undisturbed)


@lru_cache
def length(script: Script, workers: int) -> int:
    """Events of a run in which nothing goes wrong."""
    return simulate(script, workers, 0, 0, []).events


def simulate(script: Script, workers: int, starts: int, seed: int, faults: list[Fault]) -> World:
    """Run it, and compare what those who remain have with the undisturbed run."""
    results: dict[int, Result] = {}
    world = World(workers, starts, seed, live(script, results), faults)
    want = reference(script)
    try:
        world.run()
        there = [number for number, actor in world.actors.items() if actor.lingers]
        assert there
        for number in there:
            got = results[number]
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


def test_with_nothing_lost() -> None:
    for seed in range(3):
        for workers in (1, 2, 3):
            simulate(Script(evaluates=True, sparse=True, points=(4, 6)), workers, 0, seed, [])


def drawn(seed: int, deaths: int, leaves: int, starts: int) -> World:
    draw = random.Random(seed)
    script = Script(
        steps=draw.randint(2, 4),
        points=draw.choice([(4,), (6,), (4, 4), (5, 3)]),
        evaluates=draw.random() < 0.5,
        sparse=draw.random() < 0.3,
    )
    workers = draw.randint(2, 5)
    whole = length(script, workers)
    faults = [Fault(draw.randrange(whole), kind) for kind in ["kill"] * deaths + ["leave"] * leaves]
    return simulate(script, workers, starts, seed, faults)


@pytest.mark.parametrize("seed", range(100))
def test_one_is_killed(seed: int) -> None:
    drawn(seed, deaths=1, leaves=0, starts=0)


@pytest.mark.parametrize("seed", range(1000, 1100))
def test_several_are_killed(seed: int) -> None:
    drawn(seed, deaths=3, leaves=0, starts=0)


@pytest.mark.parametrize("seed", range(2000, 2100))
def test_killed_and_replaced(seed: int) -> None:
    drawn(seed, deaths=2, leaves=0, starts=3)


@pytest.mark.parametrize("seed", range(3000, 3100))
def test_killed_replaced_and_leaving(seed: int) -> None:
    drawn(seed, deaths=2, leaves=2, starts=3)
