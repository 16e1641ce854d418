"""The one order in which gradients are added, however many workers there are.

Addition of floats is not associative, so "the sum of the slots' gradients" means nothing until an
order is fixed. Slots are the leaves of one binary tree that depends on their number alone. Whoever
carries a contiguous range of leaves adds up the largest whole subtrees inside it; whoever combines
those partial sums walks the same tree. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

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
def program(cover: tuple[Range, ...], root: Range) -> tuple[Step, ...]:
    """The additions that turn a cover of the node `root` by whole subtrees into its sum.

    Registers 0 … len(cover)-1 hold the cover's sums and are never written; the last addition is the
    root's. One part alone needs no addition.

    >>> program(((0, 2), (2, 3)), (0, 3))
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

    if root[0] < root[1]:
        sum_of(*root)
    return tuple(steps)


@dataclass(frozen=True)
class Root:
    """A node that some workers can add up by themselves: which of their parts, and how."""

    sources: tuple[int, ...]
    """Numbers of the parts, in the order of `Plan.cover`."""
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """Who adds what at one reduce point: the leaves of the tree, and the ranges of them each worker carries.

    The ranges hold all leaves; or those of one machine (`among`).
    """

    leaves: int
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(leaves: int, workers: int) -> Plan:
        return Plan(leaves, tuple((part,) for part in deal(leaves, workers)))

    def without(self, lost: frozenset[int]) -> Plan:
        """The plan of those who remain: each keeps what it has, and the lost ones' leaves are dealt out.

        >>> Plan.of(8, 4).without(frozenset({1})).ranges
        (((0, 2), (2, 3)), ((4, 6), (3, 4)), ((6, 8),))
        """
        orphans = [leaf for worker in sorted(lost) for leaf in self.leaves_of(worker)]
        remaining = [ranges for worker, ranges in enumerate(self.ranges) if worker not in lost]
        shares = deal(len(orphans), len(remaining))
        return Plan(
            self.leaves,
            tuple(ranges + _runs(orphans[a:b]) for ranges, (a, b) in zip(remaining, shares, strict=True)),
        )

    def passed_on(self, members: Sequence[int], now: Sequence[int]) -> Plan:
        """This plan of the workers `members`, as those of another view take it over: in their order, and who was not
        there before has nothing.

        >>> Plan.of(4, 2).passed_on((5, 6), (7, 6)).ranges
        ((), ((2, 4), (0, 2)))
        """
        rest = self.without(frozenset(rank for rank, member in enumerate(members) if member not in now))
        ranges = dict(zip((member for member in members if member in now), rest.ranges, strict=True))
        return Plan(self.leaves, tuple(ranges.get(member, ()) for member in now))

    def among(self, first: int, last: int) -> Plan:
        """The part of the plan that these workers carry."""
        return Plan(self.leaves, self.ranges[first:last])

    def by_machine(self, sizes: tuple[int, ...]) -> Plan:
        """The same leaves with each machine, of so many workers, as one worker."""
        cuts = [sum(sizes[:machine]) for machine in range(len(sizes) + 1)]
        return Plan(self.leaves, tuple(self.among(a, b).carried for a, b in zip(cuts, cuts[1:], strict=False)))

    @cached_property
    def carried(self) -> tuple[Range, ...]:
        """All leaves of these workers, in order. After a death they need not be one range."""
        return _runs(sorted(leaf for worker in range(len(self.ranges)) for leaf in self.leaves_of(worker)))

    def leaves_of(self, worker: int) -> list[int]:
        """In the order in which the worker takes them."""
        return [leaf for part in self.ranges[worker] for leaf in range(*part)]

    def parts(self, worker: int) -> list[Range]:
        """The whole subtrees that this worker adds up by itself."""
        return self._parts[worker]

    @cached_property
    def _parts(self) -> list[list[Range]]:
        return [
            [part for lo, hi in ranges for part in whole_subtrees(lo, hi, 0, self.leaves)] for ranges in self.ranges
        ]

    @cached_property
    def cover(self) -> tuple[Range, ...]:
        return tuple(part for parts in self._parts for part in parts)

    @cached_property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """For each part of the cover: (worker, its number among that worker's parts)."""
        return tuple((worker, k) for worker, parts in enumerate(self._parts) for k in range(len(parts)))

    @cached_property
    def most_parts(self) -> int:
        return max(map(len, self._parts))

    @cached_property
    def roots(self) -> tuple[Root, ...]:
        """The largest nodes these workers can add up: the whole tree, if they carry all of it."""
        roots = []
        for a, b in [node for run in self.carried for node in whole_subtrees(*run, 0, self.leaves)]:
            sources = tuple(k for k, part in enumerate(self.cover) if a <= part[0] and part[1] <= b)
            roots.append(Root(sources, program(tuple(self.cover[k] for k in sources), (a, b))))
        return tuple(roots)


def _runs(leaves: Sequence[int]) -> tuple[Range, ...]:
    """Leaves in order, as ranges.

    >>> _runs([3, 4, 7])
    ((3, 5), (7, 8))
    """
    runs: list[list[int]] = []
    for leaf in leaves:
        if runs and runs[-1][1] == leaf:
            runs[-1][1] += 1
        else:
            runs.append([leaf, leaf + 1])
    return tuple((a, b) for a, b in runs)


def fold_scalars(values: Sequence[float], plan: Plan) -> float:
    """The total of one number per part of a complete cover, in tree order."""
    if not values:
        return 0.0
    (root,) = plan.roots
    registers = list(values)
    for left, right, _ in root.steps:
        registers.append(registers[left] + registers[right])
    return registers[-1]
