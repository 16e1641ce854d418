"""A message that is cut: each excerpt decodes to the bits that the whole message has there; nonsense is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.codecs import parse
from paceline.tensors.codecs.base import Codec, Shapes
from tests.tensors.codecs.drawn import NAMES, tries


@given(tries(), st.data())
def test_an_excerpt_decodes_to_the_bits_of_the_whole(
    drawn: tuple[Codec, Shapes, torch.Tensor, int], data: st.DataObject
) -> None:
    codec, shapes, values, seed = drawn
    message = codec.encode(values, shapes, seed, codec.start(shapes))
    whole = torch.full_like(values, 7.0)
    codec.decode(message, shapes, seed, whole)
    cuts = data.draw(st.lists(st.integers(0, values.numel()), max_size=5).map(sorted))
    for lo, hi in zip([0, *cuts], [*cuts, values.numel()], strict=True):
        if lo < hi:
            out = torch.full((hi - lo,), 7.0)
            (excerpt,) = codec.excerpts(message, shapes, seed, [(lo, hi)])
            codec.decode(excerpt, shapes, seed, out, lo)
            assert torch.equal(out.view(torch.int32), whole[lo:hi].view(torch.int32))
    assert torch.equal(codec.excerpts(message, shapes, seed, [(0, values.numel())])[0], message)


@pytest.mark.parametrize("name", NAMES)
def test_excerpts_of_large_tensors_too(name: str) -> None:
    """More than one stretch of top-k's, more than a cache of rows."""
    codec, shapes = parse(name), [(300, 700), (5,), (90_000,)]
    values = torch.randn(300_005, generator=torch.Generator().manual_seed(1))
    message = codec.encode(values, shapes, 3, codec.start(shapes))
    whole = torch.empty_like(values)
    codec.decode(message, shapes, 3, whole)
    stretches = [(0, 65_536), (65_000, 210_003), (209_999, 300_005), (131_072, 131_073)]
    for (lo, hi), excerpt in zip(stretches, codec.excerpts(message, shapes, 3, stretches), strict=True):
        out = torch.empty(hi - lo)
        codec.decode(excerpt, shapes, 3, out, lo)
        assert torch.equal(out.view(torch.int32), whole[lo:hi].view(torch.int32)), (lo, hi)


@given(st.sampled_from(NAMES), st.binary(max_size=80), st.integers(0, 500), st.integers(1, 99))
def test_bytes_that_are_no_excerpt_are_refused_or_decode_to_something(
    name: str, raw: bytes, lo: int, size: int
) -> None:
    """A server reads what anybody sends: it must not write elsewhere, nor fall over."""
    message = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    memory = torch.full((size + 2,), 7.0)
    with suppress(ValueError):
        parse(name).decode(message, [(20, 30), (7,)], 1, memory[1:-1], lo)
    assert memory[0] == memory[-1] == 7.0
