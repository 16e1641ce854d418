"""Fragments: all of the model, once, cut where the optimizer's bits do not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.fragments import ENOUGH, LEAST_BYTES, MOST_BYTES, Fragment, cut
from paceline.tensors.layout import Layout
from tests.servers.models import MODELS, sizes_of

dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64])
numels = st.one_of(st.integers(0, 300), st.integers(0, 20_000), st.just(3_000_000))
tensors = st.lists(st.tuples(numels, dtypes), max_size=12)


def laid_out(shapes: list[tuple[int, torch.dtype]], count: int) -> Layout:
    return Layout.of([torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in shapes], count)


@given(tensors, st.data())
def test_every_element_is_in_one_piece_and_every_flat_in_fragments_without_a_gap(
    shapes: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(shapes)))
    layout = laid_out(shapes, count)
    fragments = cut(layout, count)
    for flat, (_, length) in enumerate(layout.flats):
        inside = [fragment for fragment in fragments if fragment.flat == flat]
        edges = [0, *(edge for f in inside for edge in (f.start, f.stop)), length]
        assert edges[::2] == edges[1::2]
    for number, (numel, _) in enumerate(shapes):
        pieces = [piece for fragment in fragments for piece in fragment.pieces if piece.param == number]
        edges = [0, *(edge for piece in pieces for edge in (piece.lo, piece.hi)), numel]
        assert edges[::2] == edges[1::2]
        assert all(piece.lo < piece.hi and piece.lo % 64 == 0 for piece in pieces)


@given(tensors, st.data())
def test_a_piece_lies_where_the_layout_has_it_and_on_a_64_byte_boundary(
    shapes: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(shapes)))
    layout = laid_out(shapes, count)
    for fragment in cut(layout, count):
        itemsize = layout.flats[fragment.flat][0].itemsize
        assert fragment.start * itemsize % 64 == 0
        for piece in fragment.pieces:
            place = layout.pieces[piece.param]
            assert (place.flat, place.offset + piece.lo) == (fragment.flat, fragment.start + piece.at)
            assert piece.at * itemsize % 64 == 0
            assert piece.at + piece.hi - piece.lo <= fragment.stop - fragment.start


@given(tensors, st.data())
def test_fragments_are_neither_too_large_nor_too_few(
    shapes: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(shapes)))
    layout = laid_out(shapes, count)
    fragments = cut(layout, count)
    assert all(fragment.nbytes(layout) <= MOST_BYTES for fragment in fragments)
    assert sum(fragment.nbytes(layout) for fragment in fragments) == layout.nbytes
    if layout.nbytes >= ENOUGH * LEAST_BYTES:
        assert len(fragments) >= ENOUGH
    else:
        assert all(fragment.nbytes(layout) <= LEAST_BYTES for fragment in fragments)


@given(tensors, st.data())
def test_buffers_have_fragments_of_their_own_behind_the_parameters(
    shapes: list[tuple[int, torch.dtype]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(shapes)))
    fragments = cut(laid_out(shapes, count), count)
    assert [fragment.buffers for fragment in fragments] == sorted(fragment.buffers for fragment in fragments)
    for fragment in fragments:
        assert {piece.param >= count for piece in fragment.pieces} == {fragment.buffers}


def test_there_are_not_many_more_than_the_most_bytes_ask_for() -> None:
    assert len(sizes_of("one large embedding")) <= 400_000_000 // MOST_BYTES + 10


@pytest.mark.parametrize("name", MODELS)
def test_models_have_enough_fragments_to_deal_out(name: str) -> None:
    most = max(sum(sizes_of(name)) // MOST_BYTES, ENOUGH)
    assert ENOUGH <= len(sizes_of(name)) <= most + 10


def test_nothing_is_cut_into_nothing() -> None:
    assert cut(Layout.of([])) == ()
    assert cut(Layout.of([torch.empty(0)])) == ()


def sgd(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)


def adam(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=0.01, fused=True)


def rmsprop(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(tensors, lr=0.01, momentum=0.9, centered=True)


@pytest.mark.parametrize("optimizer", [sgd, adam, rmsprop])
def test_an_optimizer_gives_the_pieces_the_bits_it_gives_the_whole(
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
) -> None:
    """Fused kernels are where an odd cut shows: their vector loops fuse multiply and add, their tails do not."""
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, generator=generator) for n in (7, 5000, 64, 12_345, 190)]
    layout = Layout.of(whole)
    flats, gradients, fragments = layout.allocate(), layout.allocate(), cut(layout)
    for view, tensor in zip(layout.views(flats), whole, strict=True):
        view.copy_(tensor)
    pieces = [piece for fragment in fragments for piece in _pieces(fragment, flats)]
    assert len(pieces) > 12
    optimizers = optimizer(pieces), optimizer(whole)
    for _ in range(3):
        for flat in gradients:
            flat.copy_(torch.randn(flat.shape, generator=generator))
        for tensor, gradient in zip(whole, layout.views(gradients), strict=True):
            tensor.grad = gradient.clone()
        of_pieces = (gradient for fragment in fragments for gradient in _pieces(fragment, gradients))
        for piece, gradient in zip(pieces, of_pieces, strict=True):
            piece.grad = gradient
        for each in optimizers:
            each.step()
    for view, tensor in zip(layout.views(flats), whole, strict=True):
        assert torch.equal(view.view(torch.int32), tensor.view(torch.int32))


def _pieces(fragment: Fragment, flats: list[torch.Tensor]) -> list[torch.Tensor]:
    memory = flats[fragment.flat][fragment.start : fragment.stop]
    return [memory[piece.at : piece.at + piece.hi - piece.lo] for piece in fragment.pieces]
