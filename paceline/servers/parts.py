"""The synchronous mode: which parts of a step's gradient a server has for a fragment. Pure.

A part is named by its subtree (a, b) of the fixed tree over the leaves, not by who sent it. Subtrees are nested or
apart, never half over each other; so of two parts that overlap one lies within the other, and its sum is an addend of
the other's. After a death survivors send larger or smaller subtrees than before, or the same again: whatever completes
the tree first is taken, and the bits are those of the one tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tensors.tree import Range, whole_subtrees


@dataclass(frozen=True)
class New:
    """The part is needed: keep it, and drop these, which it contains."""

    drops: tuple[Range, ...] = ()


@dataclass(frozen=True)
class Known:
    """The part brings nothing: drop it. These hold its leaves already."""

    by: tuple[Range, ...]


class Parts:
    """The parts that are kept of one step, in one fragment: no leaf is in two of them.

    >>> parts = Parts(4)
    >>> parts.add((0, 1)), parts.add((2, 4)), parts.cover()
    (New(drops=()), New(drops=()), None)
    >>> parts.add((0, 2)), parts.add((1, 2)), parts.cover()
    (New(drops=((0, 1),)), Known(by=((0, 2),)), ((0, 2), (2, 4)))
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._kept: set[Range] = set()

    def add(self, part: Range) -> New | Known:
        """A part has come. One that is no subtree is the sender's mistake: ValueError."""
        a, b = part
        if not (a < b and whole_subtrees(a, b, 0, self._leaves) == [part]):
            raise ValueError(f"[{a}, {b}) is no subtree of the tree over {self._leaves} leaves")
        around = [kept for kept in self._kept if kept[0] <= a and b <= kept[1]]
        inside = tuple(sorted(kept for kept in self._kept if a <= kept[0] and kept[1] <= b))
        if around:
            return Known(tuple(around))
        if sum(hi - lo for lo, hi in inside) == b - a:
            return Known(inside)
        self._kept.difference_update(inside)
        self._kept.add(part)
        return New(inside)

    def cover(self) -> tuple[Range, ...] | None:
        """The parts that make up the whole tree, from left to right; None while leaves are missing."""
        return None if self.missing() else tuple(sorted(self._kept))

    def missing(self) -> tuple[Range, ...]:
        """The leaves that no part holds, as ranges."""
        edges = [(0, 0), *sorted(self._kept), (self._leaves, self._leaves)]
        return tuple((left[1], right[0]) for left, right in zip(edges, edges[1:], strict=False) if left[1] < right[0])
