"""Memory in which the workers of one machine add up their partial sums.

Each worker has a slab for its partial sums and, for each reduce point of a step, a result. A flat is cut
into chunks that are dealt out in turn. Once all have met, each worker adds up its own chunks in tree
order and writes the sum into every worker's result: each slab is read once, each result written once,
and those are all the bytes that move. Little is added up by everybody for itself: that saves a barrier.

A result lies in shared memory but belongs to its worker. Others write it only while that worker waits
inside a reduce, so what a script does to its gradients in between is its own business.

Two other ways were slower (measured, two cores that share no cache). A small ring that stays in the
cache took twice as long: a line that another core has just written comes slower than one from memory.
Reading a worker's own chunks where autograd left them cost what it saved: the copy into the slab is
made while the gradient is still cached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.tensors.layout import Layout
from paceline.tensors.segment import Segment, aligned
from paceline.tensors.sums import Scratch, TreeSum, chunks
from paceline.tensors.tree import Plan

_LITTLE_BYTES = 256 << 10

Flats = list[torch.Tensor]


class Slabs:
    def __init__(self, rank: int, size: int, layout: Layout, parts: int, allocate: Callable[[int], Segment]) -> None:
        self._rank, self._size, self.layout, self._parts, self._allocate = rank, size, layout, parts, allocate
        self._slabs = self._flats_of_workers(parts)
        self._results: dict[tuple[int, int], list[list[Flats]]] = {}
        self._sums: dict[tuple[int, Plan, tuple[int, ...]], list[TreeSum]] = {}
        self.little = layout.nbytes <= _LITTLE_BYTES

    def fits(self, plan: Plan, layout: Layout) -> bool:
        return layout is self.layout and plan.most_parts <= self._parts

    def _flats_of_workers(self, count: int) -> list[list[Flats]]:
        """Shared memory for so many sets of flats for each worker."""
        if not count:
            return [[] for _ in range(self._size)]
        nbytes = aligned(self.layout.nbytes)
        segment = self._allocate(self._size * count * nbytes)
        return [
            [_flats(segment, (worker * count + number) * nbytes, self.layout) for number in range(count)]
            for worker in range(self._size)
        ]

    def parts(self, plan: Plan) -> list[Flats]:
        """This worker's memory for its partial sums."""
        return self._slabs[self._rank][: len(plan.parts(self._rank))]

    def results(self, name: int, plan: Plan) -> list[list[Flats]]:
        """Each worker's results, one for each root of the plan."""
        key = (name, len(plan.roots))
        if key not in self._results:
            self._results[key] = self._flats_of_workers(len(plan.roots))
        return self._results[key]

    def add(self, name: int, plan: Plan, to: tuple[int, ...], divisor: float) -> None:
        """For each worker in `to` and each root of the plan: result = the root's sum / divisor."""
        key = (name, plan, to)
        if key not in self._sums:
            self._sums[key] = self._cut(plan, self.results(name, plan), to)
        for tree_sum in self._sums[key]:
            tree_sum.add(divisor)

    def _cut(self, plan: Plan, results: list[list[Flats]], to: tuple[int, ...]) -> list[TreeSum]:
        """This worker's share of the work."""
        if self.little and self._rank not in to:
            return []
        to = (self._rank,) if self.little else to
        scratch, sums = Scratch(), []
        for flat, (_, count) in enumerate(self.layout.flats):
            for window in chunks(count) if self.little else chunks(count)[self._rank :: self._size]:
                sources = [self._slabs[worker][part][flat][window] for worker, part in plan.owners]
                for number, root in enumerate(plan.roots):
                    outs = [results[worker][number][flat][window] for worker in to]
                    sums.append(TreeSum([sources[k] for k in root.sources], root.steps, outs, scratch))
        sums.reverse()  # what was written last may still be cached
        return sums


def _flats(segment: Segment, offset: int, layout: Layout) -> Flats:
    flats = []
    for dtype, count in layout.flats:
        flats.append(segment.tensor(offset, count, dtype))
        offset += count * dtype.itemsize
    return flats
