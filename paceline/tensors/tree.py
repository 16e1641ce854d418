"""The one order in which gradients are added, however many workers there are.

Addition of floats is not associative, so "the sum of the slots' gradients" means nothing until an
order is fixed. Slots are the leaves of one binary tree that depends on their number alone. Whoever
carries a contiguous range of leaves adds up the largest whole subtrees inside it; whoever combines
those partial sums walks the same tree. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]


def split(a: int, b: int) -> int:
    """Where the node over leaves [a, b) splits: at the largest power of two below its length."""
    return a + (1 << ((b - a - 1).bit_length() - 1))


def whole_subtrees(lo: int, hi: int, a: int, b: int) -> list[Range]:
    """The largest nodes of the tree over [a, b) that lie inside [lo, hi), from left to right."""
    if lo <= a and b <= hi:
        return [(a, b)] if a < b else []
    if b <= lo or hi <= a:
        return []
    mid = split(a, b)
    return whole_subtrees(lo, hi, a, mid) + whole_subtrees(lo, hi, mid, b)


def deal(leaves: int, workers: int) -> list[Range]:
    """Contiguous ranges of leaves, one a worker, whose sizes differ by at most one.

    >>> deal(12, 5)
    [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]
    """
    size, extra = divmod(leaves, workers)
    cuts = [worker * size + min(worker, extra) for worker in range(workers + 1)]
    return list(zip(cuts, cuts[1:], strict=False))


Step = tuple[int, int, int]
"""One addition: register number left, register number right, register that takes the sum."""


@lru_cache(maxsize=256)
def program(cover: tuple[Range, ...], leaves: int) -> tuple[Step, ...]:
    """The additions that turn a cover of the tree by whole subtrees into the total.

    Registers 0 … len(cover)-1 hold the cover's sums and are never written; the last addition is the
    total. One part alone needs no addition.

    >>> program(((0, 2), (2, 3)), 3)
    ((0, 1, 2),)
    """
    register = {node: index for index, node in enumerate(cover)}
    steps: list[Step] = []

    def sum_of(a: int, b: int) -> int:
        if (a, b) in register:
            return register[a, b]
        if b - a < 2:
            raise ValueError(f"leaf {a} is in no part of the cover {cover}")
        mid = split(a, b)
        left, right = sum_of(a, mid), sum_of(mid, b)
        steps.append((left, right, len(cover) + len(steps)))
        return steps[-1][2]

    if leaves:
        sum_of(0, leaves)
    return tuple(steps)


@dataclass(frozen=True)
class Plan:
    """Who adds what at one reduce point: the leaves, each worker's range, and the whole cover."""

    leaves: int
    ranges: tuple[Range, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(leaves: int, workers: int) -> Plan:
        return Plan(leaves, tuple(deal(leaves, workers)))

    def parts(self, worker: int) -> list[Range]:
        """The whole subtrees that this worker adds up by itself."""
        return whole_subtrees(*self.ranges[worker], 0, self.leaves)

    @property
    def cover(self) -> tuple[Range, ...]:
        return tuple(part for worker in range(len(self.ranges)) for part in self.parts(worker))

    @property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """For each part of the cover: (worker, its number among that worker's parts)."""
        return tuple((w, k) for w in range(len(self.ranges)) for k in range(len(self.parts(w))))

    @property
    def most_parts(self) -> int:
        return max(len(self.parts(worker)) for worker in range(len(self.ranges)))


def fold_scalars(values: Sequence[float], plan: Plan) -> float:
    """The total of one number per part of the cover, in tree order."""
    registers = list(values)
    for left, right, _ in program(plan.cover, plan.leaves):
        registers.append(registers[left] + registers[right])
    return registers[-1] if registers else 0.0
