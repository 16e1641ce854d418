"""Where each parameter lies in the flat memory that workers add up.

Parameters are laid out in the reverse of their order (backward finishes the last ones first), each
on a 64-byte boundary, one flat per dtype. A bucket is a stretch of a flat that can travel by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.tensors import lending

BUCKET_BYTES = 4 << 20
_ALIGN_BYTES = 64


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Halves are added in fp32: their sums would lose what the slots' gradients still hold. Counters
    (integer buffers) are added in fp64, where they are exact."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


@dataclass(frozen=True)
class Piece:
    """One tensor's place: which flat, from which element, and which bucket it travels with."""

    flat: int
    offset: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]
    bucket: int


@dataclass(frozen=True)
class Bucket:
    flat: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    pieces: tuple[Piece, ...]
    buckets: tuple[Bucket, ...]
    flats: tuple[tuple[torch.dtype, int], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], count: int | None = None, bucket_bytes: int = BUCKET_BYTES) -> Layout:
        """Lay out the first `count` tensors in reverse, then the rest in buckets of their own."""
        count = len(tensors) if count is None else count
        dtypes = sorted({sum_dtype(t.dtype) for t in tensors}, key=str)
        used = [0] * len(dtypes)
        open_bucket: list[int | None] = [None] * len(dtypes)
        pieces: dict[int, Piece] = {}
        buckets: list[Bucket] = []
        for index in [*range(count - 1, -1, -1), *range(count, len(tensors))]:
            tensor = tensors[index]
            if index == count:
                open_bucket = [None] * len(dtypes)
            flat = dtypes.index(sum_dtype(tensor.dtype))
            per_line = _ALIGN_BYTES // dtypes[flat].itemsize
            start, stop = used[flat], used[flat] + -(-tensor.numel() // per_line) * per_line
            at = open_bucket[flat]
            if at is None or (stop - buckets[at].start) * dtypes[flat].itemsize > bucket_bytes:
                at = open_bucket[flat] = len(buckets)
                buckets.append(Bucket(flat, start, stop))
            else:
                buckets[at] = Bucket(flat, buckets[at].start, stop)
            stride = torch.empty_like(tensor, device="meta").stride()  # its own if dense, else plain
            pieces[index] = Piece(flat, start, tensor.numel(), tensor.shape, tuple(stride), at)
            used[flat] = stop
        flats = tuple(zip(dtypes, used, strict=True))
        return Layout(tuple(pieces[i] for i in range(len(tensors))), tuple(buckets), flats)

    def only(self, tensors: Sequence[int]) -> Layout:
        """The same memory with these tensors alone, which share no bucket with others.

        >>> layout = Layout.of([torch.empty(3), torch.empty(5, dtype=torch.float64), torch.empty(7)], 2)
        >>> [(piece.numel, piece.bucket) for piece in layout.only([1, 2]).pieces]
        [(5, 0), (7, 1)]
        """
        buckets = sorted({self.pieces[tensor].bucket for tensor in tensors})
        pieces = (self.pieces[tensor] for tensor in tensors)
        mine = tuple(replace(piece, bucket=buckets.index(piece.bucket)) for piece in pieces)
        return Layout(mine, tuple(self.buckets[bucket] for bucket in buckets), self.flats)

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * count for dtype, count in self.flats)

    def allocate(self, device: torch.device | str = "cpu", lent: bool = False) -> list[torch.Tensor]:
        """`lent`: on the host, where servers of this machine can read it."""
        if lent:
            return [lending.zeros((count,), dtype) for dtype, count in self.flats]
        return [torch.zeros(count, dtype=dtype, device=device) for dtype, count in self.flats]

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor's window into these flats, in its own shape and strides."""
        return [
            torch.as_strided(flats[p.flat], p.shape, p.stride, flats[p.flat].storage_offset() + p.offset)
            for p in self.pieces
        ]
