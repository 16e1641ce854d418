"""Memory in which the workers of one machine add up their partial sums.

Each worker has a slab for its partial sums, and each reduce point of a step has its `Results`. A flat is
cut into chunks that are dealt out in turn. Once all have met, each worker adds up its own chunks in tree
order and writes the sum into the results: each slab is read once, each result written once, and those
are all the bytes that move (see `onepass`). Little is added up by everybody for itself: that saves a
barrier, and what is written stays in the cache.

Two other ways were slower (measured, two cores that share no cache). A small ring that stays in the
cache took twice as long: a line that another core has just written comes slower than one from memory.
Reading a worker's own chunks where autograd left them cost what it saved: the copy into the slab is
made while the gradient is still cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from paceline.tensors.layout import Layout
from paceline.tensors.onepass import OnePass
from paceline.tensors.results import Allocate, Results, Sets, shared_sets
from paceline.tensors.sums import Scratch, TreeSum, chunks
from paceline.tensors.tree import Plan

_LITTLE_BYTES = 256 << 10
_LAST_BIT = 62


class Slabs:
    """`counts`: how many partial sums each worker has room for."""

    def __init__(self, rank: int, layout: Layout, counts: Sequence[int], allocate: Allocate) -> None:
        self._rank, self._size, self.layout, self.counts, self._allocate = rank, len(counts), layout, counts, allocate
        slabs = iter(shared_sets(layout, sum(counts), allocate))
        self._slabs = [list(islice(slabs, count)) for count in counts]
        self._results: dict[tuple[int, int], Results] = {}
        self._sums: dict[tuple[int, Plan, tuple[int, ...], tuple[int, ...]], list[OnePass | TreeSum]] = {}
        self.little = layout.nbytes <= _LITTLE_BYTES
        self.wishes = 0
        """For which names this worker wants a result of its own: a bit each, the last for all that follow."""

    def fits(self, plan: Plan, layout: Layout) -> bool:
        return layout is self.layout and all(
            len(plan.parts(worker)) <= count for worker, count in enumerate(self.counts)
        )

    def parts(self, plan: Plan) -> Sets:
        """This worker's memory for its partial sums."""
        return self._slabs[self._rank][: len(plan.parts(self._rank))]

    def add(self, name: int, plan: Plan, to: tuple[int, ...], wishes: Sequence[int], divisor: float) -> Results:
        """This worker's share of: for each worker in `to` and each root of the plan, the root's sum / divisor.

        `wishes`: everybody's, as of this meeting.
        """
        number = (name, len(plan.roots))
        if number not in self._results:
            self._results[number] = Results(self._rank, self.layout, len(plan.roots), self._allocate)
        results = self._results[number]
        own = who_has_own(name, to, wishes)
        if not self.little:
            outs = results.outs(to, own)
        else:
            outs = results.outs_alone() if self._rank in to else []
        key = (name, plan, to, own)
        if key not in self._sums:
            self._sums[key] = self._cut(plan, outs)
        for tree_sum in self._sums[key]:
            tree_sum.add(divisor)
        return results

    def look(self, name: int, results: Results) -> None:
        """See what the script did to its last result of that name."""
        if results.look():
            self.wishes |= 1 << min(name, _LAST_BIT)

    def _cut(self, plan: Plan, outs: list[Sets]) -> list[OnePass | TreeSum]:
        """This worker's share of the work."""
        if not outs:
            return []
        scratch = Scratch()
        sums: list[OnePass | TreeSum] = []
        for flat, (_, count) in enumerate(self.layout.flats):
            for window in chunks(count) if self.little else chunks(count)[self._rank :: self._size]:
                sources = [self._slabs[worker][part][flat][window] for worker, part in plan.owners]
                for number, root in enumerate(plan.roots):
                    targets = [sets[number][flat][window] for sets in outs]
                    parts = [sources[k] for k in root.sources]
                    in_one_pass = not self.little and OnePass.can(parts, root.steps, targets)
                    sums.append(
                        OnePass(parts, root.steps, targets)
                        if in_one_pass
                        else TreeSum(parts, root.steps, targets, scratch)
                    )
        sums.reverse()  # what was written last may still be cached
        return sums


def who_has_own(name: int, to: tuple[int, ...], wishes: Sequence[int]) -> tuple[int, ...]:
    """Who gets a result of its own: whoever wishes it, and one that would share with nobody.

    >>> who_has_own(1, (0, 1, 2), [0b01, 0b10, 0b11]), who_has_own(0, (2,), [0, 0, 0])
    ((1, 2), (2,))
    """
    return to if len(to) == 1 else tuple(worker for worker in to if wishes[worker] >> min(name, _LAST_BIT) & 1)
