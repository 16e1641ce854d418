"""Where tensors lie: aligned, complete, and readable in their own shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.layout import Layout, sum_dtype

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.lists(
    st.builds(lambda shape, dtype: torch.empty(shape, dtype=dtype), shapes, st.sampled_from(DTYPES)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float64),
        (torch.int32, torch.float64),
    ],
)
def test_halves_are_added_in_fp32_and_counters_in_fp64(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert sum_dtype(dtype) == expected
    layout = Layout.of([torch.empty(3, dtype=dtype)])
    assert layout.flats[0][0] == expected


@given(tensors, st.integers(64, 400))
def test_every_piece_starts_on_64_bytes_and_none_overlap(given_tensors: list[torch.Tensor], room: int) -> None:
    layout = Layout.of(given_tensors, bucket_bytes=room)
    taken: list[set[int]] = [set() for _ in layout.flats]
    for piece, tensor in zip(layout.pieces, given_tensors, strict=True):
        dtype, size = layout.flats[piece.flat]
        assert dtype == sum_dtype(tensor.dtype)
        assert piece.numel == tensor.numel()
        assert piece.offset * dtype.itemsize % 64 == 0
        mine = set(range(piece.offset, piece.offset + piece.numel))
        assert not mine & taken[piece.flat] and piece.offset + piece.numel <= size
        taken[piece.flat] |= mine
    assert layout.nbytes == sum(dtype.itemsize * count for dtype, count in layout.flats)


@given(tensors, st.integers(64, 400), st.data())
def test_buckets_cover_the_flats_and_hold_their_pieces(
    given_tensors: list[torch.Tensor], room: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(given_tensors)))
    layout = Layout.of(given_tensors, count, bucket_bytes=room)
    for flat, (dtype, size) in enumerate(layout.flats):
        mine = [bucket for bucket in layout.buckets if bucket.flat == flat]
        assert [element for b in mine for element in range(b.start, b.stop)] == list(range(size))
        for bucket in mine:
            pieces = [p for p in layout.pieces if layout.buckets[p.bucket] is bucket]
            assert (bucket.stop - bucket.start) * dtype.itemsize <= room or len([p for p in pieces if p.numel]) == 1
    for piece in layout.pieces:
        bucket = layout.buckets[piece.bucket]
        assert bucket.flat == piece.flat
        assert bucket.start <= piece.offset and piece.offset + piece.numel <= bucket.stop


@given(tensors, st.data())
def test_no_bucket_holds_both_parameters_and_buffers(given_tensors: list[torch.Tensor], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(given_tensors)))
    layout = Layout.of(given_tensors, count)
    parameters = {piece.bucket for piece in layout.pieces[:count]}
    buffers = {piece.bucket for piece in layout.pieces[count:]}
    assert not parameters & buffers
    assert parameters | buffers == set(range(len(layout.buckets)))


def test_parameters_lie_in_the_reverse_of_their_order_so_that_the_last_bucket_leaves_first() -> None:
    layout = Layout.of([torch.empty(16) for _ in range(4)], 3, bucket_bytes=64)
    assert [piece.offset for piece in layout.pieces] == [32, 16, 0, 48]
    assert [piece.bucket for piece in layout.pieces] == [2, 1, 0, 3]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    layout = Layout.of([torch.empty(1), torch.empty(1000), torch.empty(1)], bucket_bytes=256)
    assert [(b.start, b.stop) for b in layout.buckets] == [(0, 16), (16, 1024), (1024, 1040)]


@given(tensors, st.integers(0, 2**31))
def test_views_are_windows_that_hold_what_was_written(given_tensors: list[torch.Tensor], seed: int) -> None:
    layout = Layout.of(given_tensors)
    flats = layout.allocate()
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(-100, 100, t.shape, generator=generator) for t in given_tensors]
    for view, value in zip(layout.views(flats), values, strict=True):
        view.copy_(value)
    for piece, view, value in zip(layout.pieces, layout.views(flats), values, strict=True):
        assert view.shape == value.shape and torch.equal(view, value.to(view.dtype))
        assert view.data_ptr() % 64 == 0
        assert flats[piece.flat][piece.offset : piece.offset + piece.numel].tolist() == value.reshape(-1).tolist()
    whole = sum(float(flat.double().sum()) for flat in flats)
    assert whole == sum(int(value.sum()) for value in values), "nothing is written outside the pieces"


def test_channels_last_keeps_its_strides() -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    plain = torch.randn(7)
    layout = Layout.of([weight, plain])
    flats = layout.allocate()
    view = layout.views(flats)[0]
    view.copy_(weight)
    assert view.stride() == weight.stride()
    assert view.is_contiguous(memory_format=torch.channels_last)
    piece = layout.pieces[0]
    # In memory, the values lie in the order in which the tensor's own storage has them.
    assert torch.equal(flats[0][piece.offset : piece.offset + piece.numel], weight.permute(0, 2, 3, 1).reshape(-1))


def test_an_expanded_tensor_gets_memory_of_its_own() -> None:
    layout = Layout.of([torch.zeros(1).expand(6)])
    view = layout.views(layout.allocate())[0]
    view.copy_(torch.arange(6.0))
    assert view.tolist() == [0, 1, 2, 3, 4, 5]


def test_views_of_a_flat_that_starts_inside_a_storage() -> None:
    layout = Layout.of([torch.empty(3), torch.empty(2, 2)])
    storage = torch.arange(200.0)
    flats = [storage[64 : 64 + layout.flats[0][1]]]
    views = layout.views(flats)
    assert views[1].tolist() == [[64, 65], [66, 67]]
    assert views[0].tolist() == [80, 81, 82]


def test_no_tensors_make_an_empty_layout() -> None:
    layout = Layout.of([])
    assert (layout.pieces, layout.buckets, layout.flats, layout.nbytes) == ((), (), (), 0)
    assert layout.allocate() == [] and layout.views([]) == []
