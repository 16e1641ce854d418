"""The norm over servers: the same bits for any cutting and any deal, and torch's value."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import MismatchError
from paceline.servers import norms
from paceline.servers.norms import Partial, coefficient, combine, norm, partials
from paceline.servers.pieces import Piece
from tests.servers.cutting import random_pieces, stretch

SIZES = st.lists(st.integers(0, 1500), min_size=1, max_size=5)


@given(SIZES, st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_cutting_and_any_deal_give_the_same_bits(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wholes = [(torch.randn(n, generator=generator) * 10.0 ** dice.uniform(-9, 9)).to(dtype) for n in sizes]
    found: list[Partial] = []
    for piece in random_pieces(wholes, dice):
        found += partials(piece, stretch(wholes[piece.param], piece))
    dice.shuffle(found)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=list[Partial])
    assert combine(sent, sizes) == norm(list(wholes))


@pytest.mark.parametrize("chunk", [64, 128, 1 << 20])
def test_chunks_of_the_work_do_not_show(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    gradient = torch.randn(200_003)
    want = norm([gradient])
    monkeypatch.setattr(norms, "_CHUNK", chunk)
    assert norm([gradient]) == want


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_is_close_to_torchs(max_norm: float) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((300, 70), (70,), (5,), ())]
    for param in params:
        param.grad = torch.randn_like(param)
    gradients = [param.grad.clone().view(-1) for param in params if param.grad is not None]
    ours = norm([*gradients, None])
    theirs = float(nn.utils.clip_grad_norm_(params, max_norm))
    assert ours == pytest.approx(theirs, rel=1e-6)
    for param, gradient in zip(params, gradients, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.view(-1), gradient * coefficient(ours, max_norm), rtol=1e-6, atol=0.0)


def test_the_coefficient_is_torchs_formula() -> None:
    assert coefficient(2.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert coefficient(0.5, 1.0) == 1.0
    assert coefficient(math.inf, 1.0) == 0.0
    assert math.isnan(coefficient(math.nan, 1.0))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    gradient = torch.ones(1000)
    gradient[777] = bad
    assert not math.isfinite(norm([torch.ones(3), gradient]))


def test_a_small_fragment_of_a_norm_is_a_few_numbers() -> None:
    gradient = torch.randn(1 << 20)
    assert len(partials(Piece(0, 0, 1 << 20), gradient)) == 1
    assert len(partials(Piece(0, 64, 64 + (1 << 20)), gradient)) < 32


def test_missing_and_doubled_partial_sums_are_refused() -> None:
    gradient = torch.ones(640)
    first, rest = partials(Piece(0, 0, 320), gradient[:320]), partials(Piece(0, 320, 640), gradient[320:])
    assert combine(first + rest, [640]) == math.sqrt(640)
    for wrong in (first, rest, first + rest + first):
        with pytest.raises(MismatchError, match="cover"):
            combine(wrong, [640])


def test_no_gradient_at_all_has_norm_zero() -> None:
    assert norm([None, torch.empty(0)]) == 0.0
