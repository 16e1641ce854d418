"""Newcomers on several machines heal while the others train, in the simulated run: the same bits, whoever is lost."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from paceline.errors import MismatchError
from paceline.state.replica import Replica
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Point
from paceline.tensors.following import Following
from paceline.tensors.remembering import Met, Past
from paceline.tensors.tree import Plan
from paceline.wires.pace import Pace
from paceline.wires.view import View
from paceline.worker.healing import _donors
from tests.several.mesh import CPU
from tests.several.training import Script
from tests.several.world import Fault, World
from tests.worker.test_terms import breaks, joined, length, seeds, simulate

BATCH = 6
"""Seeds a test."""
FIRST = Fault("sums in term 1")
"""Somebody is killed early, and another one comes."""


def drawn(seed: int, *later: str, starts: int) -> World:
    """A run of this seed: somebody is killed early, and later, at any moment, whatever is said."""
    draw = random.Random(seed)
    script, workers = Script.drawn(draw, 10, 24), draw.randint(2, 4)
    whole = length(script, workers)
    faults = [Fault(draw.randrange(whole // 3)), *(Fault(draw.randrange(2 * whole), kind) for kind in later)]
    return simulate(script, workers, starts, seed, faults)


@pytest.mark.parametrize("first", seeds(0, 1, BATCH))
def test_one_is_killed_and_another_comes(first: int) -> None:
    worlds = [drawn(seed, starts=1) for seed in range(first, first + BATCH)]
    assert sum(len(joined(world)) for world in worlds) > BATCH // 2


@pytest.mark.parametrize("first", seeds(1000, 1, BATCH))
def test_two_newcomers(first: int) -> None:
    """They may have the same donor, and one of them comes in while the other follows."""
    worlds = [simulate(SCRIPTS[seed % 3], 3, 2, seed, [FIRST, FIRST]) for seed in range(first, first + BATCH)]
    assert sum(len(joined(world)) == 2 for world in worlds) > BATCH // 4


@pytest.mark.parametrize("first", seeds(2000, 1, BATCH))
def test_the_donor_is_killed_at_any_moment(first: int) -> None:
    worlds = [drawn(seed, "kill a donor", "kill a donor", starts=6) for seed in range(first, first + BATCH)]
    assert sum(len(joined(world)) for world in worlds) > BATCH // 2


@pytest.mark.parametrize("first", seeds(3000, 1, BATCH))
def test_anybody_is_killed_or_leaves(first: int) -> None:
    worlds = [drawn(seed, "kill", "kill", "leave", starts=6) for seed in range(first, first + BATCH)]
    assert sum(len(joined(world)) for world in worlds) >= BATCH // 3


SCRIPTS = [Script(30, (4,), True, True), Script(30, (5, 3), True), Script(30, (6,))]


@pytest.mark.parametrize("moment", ["waits for the state", "follows"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_donor_is_killed(script: Script, moment: str) -> None:
    """Before the state is there another one is called; behind that the newcomer gives up, and one more comes."""
    worlds = [simulate(script, 3, 4, seed, [FIRST, Fault(moment, "kill a donor")]) for seed in range(BATCH)]
    gave_up = sum(actor.overtaken is not None for world in worlds for actor in world.actors.values())
    assert gave_up == 0 if moment == "waits for the state" else gave_up > BATCH // 2
    assert sum(len(joined(world)) == 2 for world in worlds) > BATCH // 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_one_than_the_donor_is_killed(script: Script) -> None:
    """That is nothing to a newcomer that follows."""
    for seed in range(BATCH):
        world = simulate(script, 4, 4, seed, [FIRST, Fault("follows", "kill a bystander")])
        assert not any(actor.overtaken for actor in world.actors.values())


SLOW = {
    **{(one, other): 3.0 for one in range(4) for other in range(4)},
    **{("worker", member): 3.0 for member in range(3)},
    **{("board", number): 3.0 for number in range(4)},
    "news": 3.0,
    ("worker", 3): 0.1,
    **{(donor, 3): 0.1 for donor in range(3)},
}
"""Worker 3 computes and hears thirty times as slowly as the others."""


def test_a_slow_newcomer_comes_in_because_its_donor_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [simulate(Script(60), 3, 1, seed, [FIRST], SLOW) for seed in range(3)]
    assert all(world.waits_for_newcomers and joined(world) for world in worlds)
    monkeypatch.setattr(Pace, "may_meet", lambda self, now: True)
    worlds = [simulate(Script(60), 3, 1, seed, [FIRST], SLOW) for seed in range(3)]
    assert not any(joined(world) for world in worlds), "it would have come in anyway"


# what would happen without each of the rules


def test_every_meeting_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Past.complete

    def forgetful(self: Past, met: Met) -> None:
        after, self.after = self.after, (lambda met: None) if self.completed % 7 == 0 else self.after
        complete(self, met)
        self.after = after

    monkeypatch.setattr(Past, "complete", forgetful)
    assert breaks(lambda seed: drawn(seed, starts=1), range(20))


# parts


def test_what_a_follower_computes_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.grad = torch.ones(4, 3)
    replica, strategy = Replica(CPU), AllReduce()
    replica.add_model(model)
    before = [buffer.clone() for buffer in model.buffers()]

    def take() -> memoryview:
        raise AssertionError("nobody has met")

    strategy.attach(replica, Following(Past(), CPU, take, lambda view: None), True, None)
    strategy.begin_step()
    strategy.open(Point(0, 0, 4), Plan(4, (((0, 4),), ())), flat=False)
    strategy.weigh(1.0)
    model(torch.randn(5, 3)).square().sum().backward()
    strategy.drop()
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))
    assert torch.equal(strategy._old[0], torch.ones(4, 3)), "what was there before the point will be added"
    strategy.close()


def test_what_came_of_a_meeting_as_bytes() -> None:
    rows = torch.arange(12).reshape(3, 4).numpy()
    plan = Plan.of(6, 3).without(frozenset({1}))
    met = Met(-5, View(4, (0, 7)), plan, rows, [torch.tensor([1.0, -0.0])], [])
    got = Met.unpack(memoryview(met.pack()), CPU)
    assert (got.key, got.view, got.plan, got.rows.tolist()) == (-5, View(4, (0, 7)), plan, rows.tolist())
    assert got.flats[0].numpy().tobytes() == met.flats[0].numpy().tobytes()
    said = Met(3, View(1, (0,)), payloads=[b"", b"x" * 100])
    again = Met.unpack(memoryview(said.pack()), CPU)
    assert (again.plan, again.payloads, again.flats) == (None, said.payloads, [])


def test_a_newcomer_at_another_place_is_told_so() -> None:
    met = Met(3, View(1, (0,)), payloads=[b""])
    following = Following(Past(), CPU, lambda: memoryview(met.pack()), lambda view: None)
    with pytest.raises(MismatchError, match="another place in the script than worker 0"):
        following.gather(4, b"")


def test_newcomers_call_members_of_their_own_machine_first() -> None:
    homes = {0: 0, 1: 0, 2: 1, 3: 1}
    view = View(1, (0, 1, 2, 3))
    for worker in range(4, 12):
        assert set(_donors(view, homes, 1, worker)[:2]) == {2, 3}
    assert {_donors(view, homes, 2, worker)[0] for worker in range(4, 12)} == {0, 1, 2, 3}
