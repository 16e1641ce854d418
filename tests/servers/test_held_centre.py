"""One fragment of the centre: in whatever order clients come, and whoever takes over when, θ is the same bits."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.servers.fragments import cut
from paceline.servers.held import as_bytes
from paceline.servers.held_centre import HeldCentre, Said
from paceline.servers.messages import Apply, Bring, Lay, Stage
from paceline.servers.outer import OUTERS, make
from paceline.servers.rounds import Closed
from paceline.tensors.layout import Layout

SIZE, CLIENTS = 200, 5
LAYOUT = Layout.of([torch.empty(SIZE), torch.empty(7)], 1)
PARAMETERS, BUFFERS = cut(LAYOUT, 1)[0], cut(LAYOUT, 1)[-1]


def say(held: HeldCentre, said: Said, body: memoryview | bytes | bytearray) -> None:
    with held.changed:
        if not held.knows(said, memoryview(body)):
            held.do(said, memoryview(body))


def copy_of(held: HeldCentre) -> HeldCentre:
    """As a primary fills a backup."""
    other = HeldCentre(PARAMETERS, torch.float32, held._outer, since=2)
    for said, body in held.all_said():
        say(other, said, bytearray(b"".join(body)))
    return other


def begun(outer: str = "sgd") -> HeldCentre:
    held = HeldCentre(PARAMETERS, torch.float32, make(outer), since=1)
    say(held, Lay([0], 0), as_bytes(torch.linspace(-1, 1, len(held.value))))
    return held


def brought(held: HeldCentre, number: int, leaf: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(number * 100 + leaf)
    return torch.randn(len(held.value), generator=made)


def closed(*leaves: int) -> bytes:
    return msgspec.msgpack.encode(Closed([(leaf, 10 + leaf) for leaf in leaves], [], 0))


@pytest.mark.parametrize("outer", OUTERS)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_the_order_of_arrival_and_a_failover_anywhere_change_no_bit(outer: str, seed: int) -> None:
    dice = random.Random(seed)
    plain, torn = begun(outer), begun(outer)
    for number in range(3):
        came = sorted(dice.sample(range(CLIENTS), dice.randint(0, CLIENTS)))
        for leaf in came:
            say(plain, Bring(number, leaf, [0]), as_bytes(brought(plain, number, leaf)))
        for leaf in dice.sample(came, len(came)):
            for _ in range(dice.randint(1, 2)):
                say(torn, Bring(number, leaf, [0]), as_bytes(brought(torn, number, leaf)))
            if dice.random() < 0.3:
                torn = copy_of(torn)
        for held in (plain, torn):
            say(held, Apply(number + 1, [0]), closed(*came))
        say(torn, Apply(number + 1, [0]), closed(*came))
    assert plain.version == torn.version == 3
    assert torch.equal(plain.value, torn.value)


def test_it_is_the_mean_by_weights() -> None:
    held = begun()
    theta = held.value.double()
    for leaf in (0, 2, 3):
        say(held, Bring(0, leaf, [0]), as_bytes(brought(held, 0, leaf)))
    say(held, Apply(1, [0]), closed(0, 2, 3))
    want = theta - sum((10 + leaf) * brought(held, 0, leaf).double() for leaf in (0, 2, 3)) / 35
    torch.testing.assert_close(held.value.double(), want, rtol=1e-6, atol=1e-6)


def test_who_came_too_late_is_not_in_it_and_is_forgotten() -> None:
    held, other = begun(), begun()
    for leaf in (0, 1):
        say(held, Bring(0, leaf, [0]), as_bytes(brought(held, 0, leaf)))
    say(other, Bring(0, 0, [0]), as_bytes(brought(held, 0, 0)))
    for each in (held, other):
        say(each, Apply(1, [0]), closed(0))
    say(held, Bring(0, 2, [0]), as_bytes(brought(held, 0, 2)))
    assert torch.equal(held.value, other.value)
    assert held.states().tree["brought"] == []


def test_a_round_to_which_nobody_came_moves_nothing_and_is_no_step_of_the_outer_optimizer() -> None:
    held = begun("adam")
    before = held.value.clone()
    say(held, Apply(1, [0]), closed())
    assert held.version == 1 and torch.equal(held.value, before)
    assert held.states().tree["steps"] == 0


def test_buffers_are_averaged_whatever_the_parameters_do() -> None:
    held = HeldCentre(BUFFERS, torch.float32, make("adam"), since=1)
    say(held, Lay([1], 0), as_bytes(torch.ones(len(held.value))))
    say(held, Bring(0, 0, [1]), as_bytes(torch.full((len(held.value),), 0.5)))
    say(held, Apply(1, [1]), closed(0))
    assert torch.equal(held.value, torch.full((len(held.value),), 0.5))


def test_what_cannot_be_is_refused() -> None:
    held = begun()
    with pytest.raises(ValueError, match=r"of round 0, what clients \[3\] have brought is not here"):
        say(held, Apply(1, [0]), closed(3))
    with pytest.raises(ValueError, match="round 4 is over, and 0 rounds are in θ"):
        say(held, Apply(5, [0]), closed())
    with pytest.raises(ValueError, match="3 bytes for a fragment of"):
        say(held, Bring(0, 0, [0]), b"abc")
    with pytest.raises(ValueError, match="a Stage of a fragment that clients are averaged in"):
        say(held, Stage(0, 1, [0]), b"")  # type: ignore[arg-type]
