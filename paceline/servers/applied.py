"""The asynchronous modes: which micro-batches have been applied, so that each counts once. Pure.

A push is named by the micro-batch it came from, (epoch, number), not by its worker: whoever computes one again after a
death, its name says whether it still counts. The names are kept as ranges: what is applied fills up from the start, so
what there is to remember are the gaps, as many as micro-batches are under way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from paceline.tensors.tree import Range

Name = tuple[int, int]
"""A micro-batch: its epoch, and its number within."""


class Applied(msgspec.Struct):
    """The micro-batches that have been applied; a plain struct, so that it travels with whatever it belongs to.

    >>> applied = Applied()
    >>> [applied.add((0, number)) for number in (0, 1, 3, 1)]
    [True, True, True, False]
    >>> (0, 1) in applied, applied.missing(0, 5), applied.done(0, 2), applied.done(0, 4)
    (True, ((2, 3), (4, 5)), True, False)
    """

    epochs: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """By epoch, where ranges of applied numbers begin and end in turn: [0, 2, 3, 4] is 0, 1 and 3."""

    def __post_init__(self) -> None:
        """It may have come over a wire."""
        for epoch, edges in self.epochs.items():
            if epoch < 0 or len(edges) % 2 or not edges or edges[0] < 0 or any(a >= b for a, b in pairwise(edges)):
                raise ValueError(f"these are no ranges of micro-batches: epoch {epoch}, {edges[:8]}")

    def add(self, name: Name) -> bool:
        """Whether it was not there before."""
        epoch, number = name
        if epoch < 0 or number < 0:
            raise ValueError(f"there is no micro-batch {number} of epoch {epoch}")
        edges = self.epochs.setdefault(epoch, [])
        at = bisect_right(edges, number)
        if at % 2:
            return False
        # A range ends where this one begins, one begins where it ends: then these edges are none any more.
        first = at - 1 if at and edges[at - 1] == number else at
        last = at + 1 if at < len(edges) and edges[at] == number + 1 else at
        edges[first:last] = [number] * (first == at) + [number + 1] * (last == at)
        return True

    def __contains__(self, name: Name) -> bool:
        epoch, number = name
        return bisect_right(self.epochs.get(epoch, []), number) % 2 == 1

    def merge(self, other: Applied) -> None:
        """Take in all that the other has."""
        for epoch, edges in other.epochs.items():
            self.epochs[epoch] = _united([*_ranges(self.epochs.get(epoch, [])), *_ranges(edges)])

    def missing(self, epoch: int, total: int) -> tuple[Range, ...]:
        """What is not applied yet of the epoch's `total` micro-batches."""
        edges = [0, *self.epochs.get(epoch, []), total]
        return tuple((a, min(b, total)) for a, b in _ranges(edges) if a < min(b, total))

    def done(self, epoch: int, total: int) -> bool:
        return not self.missing(epoch, total)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Applied:
        """Anything but an encoded set is a ValueError."""
        return msgspec.msgpack.decode(data, type=Applied)


def _ranges(edges: list[int]) -> Iterable[Range]:
    return zip(edges[::2], edges[1::2], strict=True)


def _united(ranges: Iterable[Range]) -> list[int]:
    """The edges of what lies in any of these.

    >>> _united([(4, 6), (0, 2), (2, 3), (5, 9)])
    [0, 3, 4, 9]
    """
    edges: list[int] = []
    for a, b in sorted(ranges):
        if edges and a <= edges[-1]:
            edges[-1] = max(edges[-1], b)
        else:
            edges += [a, b]
    return edges
