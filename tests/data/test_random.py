"""Seeding the generators that a script may draw from, and telling whether it has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import random as paceline_random
from paceline.data import twisters
from paceline.data.random import seeded, set_known_seed, set_seed, untouched
from paceline.data.twisters import Asked, Found, Twisters

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, a pair": lambda: random.gauss(0, 1),  # keeps the second number for the next time
    "python, reseeded": lambda: random.seed(3),
    "numpy": np.random.random,
    "numpy, a pair": np.random.standard_normal,
    "numpy, reseeded": lambda: np.random.seed(3),
    "torch": lambda: torch.rand(()),
    "torch, a pair": lambda: torch.randn(()),
    "torch, a whole round": lambda: torch.rand(624),
    "numpy, a whole round": lambda: np.random.bytes(4 * 624),
    "python, a whole round": lambda: random.getrandbits(32 * 624),
}


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    with seeded(0):
        yield


@pytest.fixture(params=[Found, Asked])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Twisters:
    made: Twisters = request.param()
    monkeypatch.setattr(paceline_random, "_twisters", made)
    set_seed(0)  # what was read by another kind of them says nothing
    return made


def some_numbers() -> tuple[object, ...]:
    return random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


@given(
    before=st.lists(st.sampled_from(sorted(DRAWS)), max_size=3), seeds=st.lists(st.integers(0, 2**63 - 1), max_size=3)
)
def test_a_seed_leaves_nothing_of_what_was_before(before: list[str], seeds: list[int]) -> None:
    """Whatever was drawn, and whether it was seeded then or not; torch's and numpy's are as their own seeding leaves them."""
    with seeded(0):
        for seed in [1, *seeds]:
            set_seed(seed)
        for name in before:
            DRAWS[name]()
        seed = seeds[0] if seeds else 2**31 + 5
        set_seed(seed)
        got = some_numbers()
        Asked().seed(seed, b"")
        assert got == some_numbers()
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        assert got[2:] == some_numbers()[2:]


def test_pythons_numbers_are_others_than_numpys(watched: Twisters) -> None:
    """Which are torch's, as they are where a script seeds both; but random.random() before np.random.random() is common."""
    set_seed(5)
    mine, numpys = [random.random() for _ in range(2000)], np.random.random(2000)
    assert not set(mine) & set(numpys.tolist())
    assert abs(float(np.corrcoef(mine, numpys)[0, 1])) < 0.1
    assert abs(float(np.mean(mine)) - 0.5) < 0.03


@pytest.mark.parametrize("name", DRAWS)
def test_whatever_is_drawn_is_seen(name: str, watched: Twisters) -> None:
    set_seed(5)
    assert untouched()
    DRAWS[name]()
    assert not untouched()
    set_known_seed(1)
    assert untouched()
    DRAWS[name]()
    assert not untouched()


@pytest.mark.parametrize("name", DRAWS)
def test_a_known_seed_leaves_no_number_of_a_pair_behind(name: str, watched: Twisters) -> None:
    """Else the code that follows would draw it, and nothing would move."""
    set_seed(5)
    DRAWS[name]()
    set_known_seed(1)
    for draw in (random.gauss, np.random.normal):
        before = watched.read()
        draw(0, 1)
        assert watched.read() != before


def test_a_known_seed_is_the_one_that_torch_tells(watched: Twisters) -> None:
    set_seed(5)
    set_known_seed(77)
    assert torch.initial_seed() == 77 and untouched()


def test_another_generator_behind_numpys_functions_is_watched_too(watched: Twisters) -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(3))
    try:
        set_seed(5)
        first = np.random.random()
        assert not untouched()
        set_seed(5)
        assert untouched() and np.random.random() == first
    finally:
        np.random.set_bit_generator(own)


def test_a_generator_behind_numpys_functions_that_is_no_twister(watched: Twisters) -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        set_seed(5)
        assert untouched()
        first = np.random.standard_normal(3).tolist()
        assert not untouched()
        set_seed(5)
        assert untouched() and np.random.standard_normal(3).tolist() == first
    finally:
        np.random.set_bit_generator(own)


def test_the_second_of_a_pair_that_was_put_there_is_gone_with_the_next_seed(watched: Twisters) -> None:
    """As by who saves the state, draws, and brings it back."""
    set_seed(5)
    first = np.random.standard_normal(), random.gauss(0, 1)
    set_seed(4)
    np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": 0.123})
    random.setstate((*random.getstate()[:2], 0.123))
    assert not untouched()
    set_seed(5)
    assert (np.random.standard_normal(), random.gauss(0, 1)) == first


def test_what_is_found_is_used_only_where_it_proves_true(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(twisters.find()) is Found

    class Astray(Found):
        def seed(self, seed: int, before: bytes) -> None:
            super().seed(seed, before)
            self._numpy_state[7] ^= 1

    class Misnamed(Found):
        def name(self, seed: int) -> None:
            self._numpy_state[:8] = seed.to_bytes(8, "little")

    class Blind(Found):
        def read(self) -> bytes:
            return super().read()[:-20]  # nothing of numpy's

    class Elsewhere(Found):
        def __init__(self) -> None:
            raise ValueError

    for kind in (Astray, Misnamed, Blind, Elsewhere):
        before = np.random.get_state()[1].copy()
        monkeypatch.setattr(twisters, "Found", kind)
        assert type(twisters.find()) is Asked
        assert np.array_equal(before, np.random.get_state()[1]), "the generators are as they were"
