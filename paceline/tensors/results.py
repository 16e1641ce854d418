"""Where the sums of a reduce point go: into one result that workers share, or into some of their own.

Written once is cheapest, so at first all share one result, and each sees it through pages that it may
change (see `mirror`). A script that changes its gradients in place (clipping, unscaling, zeroing) pays
for that with a copy of each page; so its worker asks for a result of its own, which the others write
too. It asks before a meeting and all look behind it: they agree on who has asked.

Whatever its kind, a result is written only while the workers that have it wait inside a reduce: what a
script does to its gradients in between is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.tensors.layout import Layout
from paceline.tensors.mirror import Mirror
from paceline.tensors.segment import Segment, aligned

Flats = list[torch.Tensor]
Sets = list[Flats]
Allocate = Callable[[int], int]
"""Size → a descriptor of shared memory. All workers ask in the same order and get the same."""

_MUCH = 1 / 8
"""Share of the pages from which on a result of one's own is cheaper than bringing them up to date."""


class Results:
    """Those of one reduce point; each is `count` sets of flats."""

    def __init__(self, rank: int, layout: Layout, count: int, allocate: Allocate) -> None:
        self._rank, self._layout, self._count, self._allocate = rank, layout, count, allocate
        self._own: dict[int, Sets] = {}
        self._shared: tuple[Mirror, Sets, Sets] | None = None
        self._seen: Mirror | None = None
        self.mine: Sets = []
        """This worker's result of the sums in hand."""

    def outs(self, to: Sequence[int], own: Sequence[int]) -> list[Sets]:
        """What to write so that each worker in `to` has the sums: in memory of its own for those in `own`."""
        outs = [self._own_of(worker) for worker in own]
        self.mine, self._seen = self._own.get(self._rank, []), None
        if len(own) < len(to):
            mirror, written, seen = self._shared_result()
            outs.append(written)
            if self._rank in to and self._rank not in own:
                self.mine, self._seen = seen, mirror
        return outs

    def outs_alone(self) -> list[Sets]:
        """A result that no other worker writes: plain memory."""
        if not self.mine:
            self.mine = [self._layout.allocate() for _ in range(self._count)]
        return [self.mine]

    def look(self) -> bool:
        """See what the script did to its last result; whether this worker should ask for its own."""
        return self._seen is not None and self._seen.look() > _MUCH

    def catch_up(self) -> None:
        """Behind `look`, when all have written."""
        if self._seen is not None:
            self._seen.catch_up()

    def _own_of(self, worker: int) -> Sets:
        if worker not in self._own:
            self._own[worker] = shared_sets(self._layout, self._count, self._allocate)
        return self._own[worker]

    def _shared_result(self) -> tuple[Mirror, Sets, Sets]:
        if self._shared is None:
            size = self._count * aligned(self._layout.nbytes)
            mirror = Mirror(self._allocate(Mirror.needs(size)), size)
            written, seen = (_sets_in(mapped, self._layout, self._count) for mapped in (mirror.shared, mirror.own))
            self._shared = mirror, written, seen
        return self._shared


def shared_sets(layout: Layout, count: int, allocate: Allocate) -> Sets:
    """Shared memory for so many sets of flats."""
    size = count * aligned(layout.nbytes)
    return _sets_in(Segment(allocate(size), size), layout, count) if size else [layout.allocate() for _ in range(count)]


def _sets_in(segment: Segment, layout: Layout, count: int) -> Sets:
    sets = []
    for number in range(count):
        offset, flats = number * aligned(layout.nbytes), []
        for dtype, size in layout.flats:
            flats.append(segment.tensor(offset, size, dtype))
            offset += size * dtype.itemsize
        sets.append(flats)
    return sets
