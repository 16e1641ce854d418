"""The flat parameters, cut into what servers hold and streams carry: fragments. Pure.

A fragment is a stretch of one flat of a layout. Where it is cut follows from the layout alone, never from how many
servers there are, so that servers may come and go while everybody's fragments stay what they are. Torch's vector loops
compute the last few elements of a tensor otherwise than the rest, in fused optimizers with other bits (measured). So a
parameter is cut at multiples of 64 elements only, and every piece begins on a 64-byte boundary, as the parameter itself
does: an optimizer then gives the pieces the bits it would give the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.servers.pieces import LINE, Piece
from paceline.tensors.layout import Layout

MOST_BYTES = 4 << 20
LEAST_BYTES = 1 << 10
"""A fragment costs a message: smaller ones would balance better and travel worse."""
ENOUGH = 12
"""So many fragments can be dealt to a few servers evenly, so small models are cut finer; each costs a server as much as any."""
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of one flat, with the padding behind its pieces."""

    flat: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    buffers: bool = False
    """Its pieces are of buffers: no optimizer runs over them."""

    def nbytes(self, layout: Layout) -> int:
        return (self.stop - self.start) * layout.flats[self.flat][0].itemsize


def cut(layout: Layout, count: int | None = None) -> tuple[Fragment, ...]:
    """All of the layout, whose first `count` tensors are parameters, in fragments: parameters first, in their order in
    memory.

    >>> import torch
    >>> for fragment in cut(Layout.of([torch.empty(10), torch.empty(300)])):
    ...     print(fragment.start, fragment.stop, *fragment.pieces)
    0 256 Piece(param=1, lo=0, hi=256, at=0)
    256 320 Piece(param=1, lo=256, hi=300, at=0) Piece(param=0, lo=0, hi=10, at=48)
    """
    count = len(layout.pieces) if count is None else count
    most_bytes = min(MOST_BYTES, max(LEAST_BYTES, layout.nbytes // ENOUGH))
    return (
        *_fragments(layout, range(count - 1, -1, -1), most_bytes, buffers=False),
        *_fragments(layout, range(count, len(layout.pieces)), most_bytes, buffers=True),
    )


def _fragments(layout: Layout, tensors: Iterable[int], most_bytes: int, *, buffers: bool) -> Iterator[Fragment]:
    """These tensors, given as they lie in memory, by flats."""
    tensors = list(tensors)
    for flat, (dtype, _) in enumerate(layout.flats):
        inside = [tensor for tensor in tensors if layout.pieces[tensor].flat == flat]
        for pieces in _stretches(layout, inside, most_bytes // dtype.itemsize):
            first, last = pieces[0], pieces[-1]
            start = layout.pieces[first.param].offset + first.lo
            per_line = _ALIGN_BYTES // dtype.itemsize
            stop = layout.pieces[last.param].offset + -(-last.hi // per_line) * per_line
            yield Fragment(flat, start, stop, tuple(pieces), buffers)


def _stretches(layout: Layout, tensors: Iterable[int], most: int) -> Iterator[list[Piece]]:
    """The pieces of one fragment after the other, each as long as `most` elements allow."""
    most = max(LINE, most // LINE * LINE)
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        place, lo = layout.pieces[tensor], 0
        while lo < place.numel:
            begin = place.offset + lo
            start = start if pieces else begin
            room = start + most - begin
            hi = place.numel if place.numel - lo <= room else lo + room // LINE * LINE
            if lo < hi:
                pieces.append(Piece(tensor, lo, hi, begin - start))
            if hi < place.numel:
                yield pieces
                pieces = []
            lo = hi
    if pieces:
        yield pieces
