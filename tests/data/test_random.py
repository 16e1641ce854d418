"""Seeding the generators that a script may draw from."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from paceline.data.random import next_draws, seeded, set_seed


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**32 + 7, 2**63 - 1])
def test_each_generator_is_as_its_own_seeding_leaves_it(seed: int) -> None:
    with seeded(0):
        random.gauss(0, 1)  # keeps a second number for the next time
        set_seed(seed)
        got = random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        assert got == (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist())


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()), lambda: random.seed(3)])
def test_whatever_is_drawn_is_seen(draw: object) -> None:
    assert callable(draw)
    with seeded(5):
        untouched = next_draws()
        set_seed(5)
        assert next_draws() == untouched
        set_seed(5)
        draw()
        assert next_draws() != untouched
