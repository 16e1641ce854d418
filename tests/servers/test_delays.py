"""Damping and delay compensation."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.servers.delays import Delays, split


def test_a_mode_without_options_has_no_delays() -> None:
    assert split("async") == ("async", Delays()) and not split("async")[1]


@pytest.mark.parametrize("text", ["async+dc", "async+dc:x", "async+dc:-1", "async+zip:1", "async+dc:1+dc:2", "async+"])
def test_nonsense_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match=r"write async\+damp:0.5, async\+dc:0.04, or a codec: async\+int8"):
        split(text)


def test_more_pushes_between_count_less() -> None:
    factors = [Delays(damping=1.0).factor(between) for between in (0, 1, 3)]
    assert factors == [1.0, 0.5, 0.25]


def test_compensation_brings_a_quadratic_s_gradient_nearer_to_where_the_weights_are_now() -> None:
    """For f = w² / 2 with its gradient w, the curvature is 1; g g is the compensation's guess at it."""
    then, now = torch.tensor([1.0, -1.0]), torch.tensor([0.9, -0.8])
    gradient = then.clone()
    Delays(compensation=1.0).compensate(gradient, now, then)
    assert torch.allclose(gradient, now)
