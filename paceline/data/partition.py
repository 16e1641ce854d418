"""How a batch is cut into shares, and a data set into parts. Pure: numbers in, ranges out.

Three splits, chosen with ``--split``:

    even         the batch is cut into one share a slot; sizes differ by at most one
    1,1,2,…      the same, in proportion: one weight a slot (a faster machine's slots get more)
    rows         each slot draws from its own block of ceil(rows / slots) rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from paceline.data.order import Ids, Order, Shuffled, digest_in_order, mix
from paceline.errors import UsageError

Range = tuple[int, int]


def by_proportion(total: int, weights: Sequence[Fraction | int]) -> list[Range]:
    """Ranges of [0, total) whose sizes follow the weights, none off by one or more.

    >>> by_proportion(10, [1, 1, 2])
    [(0, 3), (3, 5), (5, 10)]
    """
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise UsageError(f"weights must be positive numbers, one a part; got {list(weights)}")
    whole, running, cuts = sum(weights), Fraction(0), [0]
    for weight in weights:
        running += Fraction(weight)
        exact = total * running / whole
        cuts.append(-int(-exact // 1))  # round up: a batch smaller than the slots fills the first ones
    return list(zip(cuts, cuts[1:], strict=False))


def evenly(total: int, parts: int) -> list[Range]:
    """Ranges of [0, total) whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(total, parts)
    cuts = [part * size + min(part, extra) for part in range(parts + 1)]
    return list(zip(cuts, cuts[1:], strict=False))


def by_rows(rows: int, parts: int) -> list[Range]:
    """Blocks of ceil(rows / parts); the last ones may be short or empty."""
    size = -(-rows // parts)
    return [(min(part * size, rows), min((part + 1) * size, rows)) for part in range(parts)]


def skew(sizes: Sequence[int]) -> float:
    """How far the largest part is above the mean (0.0: perfectly even)."""
    mean = sum(sizes) / len(sizes) if sizes else 0
    return max(sizes) / mean - 1 if mean else 0.0


@dataclass(frozen=True)
class Split:
    """A parsed ``--split``: its kind and, for a proportion, the weight of each slot."""

    kind: str = "even"
    weights: tuple[Fraction, ...] = ()

    @staticmethod
    def parse(text: str, slots: int) -> Split:
        if text in ("even", "rows"):
            return Split(text)
        try:
            weights = tuple(Fraction(part) for part in text.split(","))
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"--split {text!r} is none of: even, rows, or one weight a slot such as 1,1,2,4") from None
        if len(weights) != slots:
            raise UsageError(f"--split gives {len(weights)} weights for {slots} slots: give one a slot")
        if min(weights) <= 0:
            raise UsageError(f"--split {text!r}: every weight must be above zero")
        return Split("proportion", weights)

    def cut(self, size: int, slots: int) -> list[Range]:
        """One batch of `size` samples, cut into the slots' shares."""
        if self.kind == "proportion" and len(self.weights) == slots:
            return by_proportion(size, self.weights)
        return evenly(size, slots)


class Shares(ABC):
    """Which samples each slot trains in each step of an epoch: seekable, and the same everywhere."""

    steps: int

    def begin(self, epoch: int) -> None:  # noqa: B027  most have nothing to do
        """An epoch starts: `steps` holds for it from now on."""

    @abstractmethod
    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        """The samples of one slot's share."""

    def digest(self, epoch: int) -> int:
        """Of the order of the epoch's ids, where a user's sampler deals them; else 0."""
        return 0

    @abstractmethod
    def sizes(self, epoch: int, step: int) -> list[int]:
        """How many samples each slot has in this step: what a share's gradient weighs."""


class BatchShares(Shares):
    """A global batch at a time from one order over the whole set, cut into shares."""

    _AHEAD = 16384
    """Positions asked of the order at once: a shuffle is cheap by the array, dear by the sample."""

    def __init__(self, order: Order, batch: int, slots: int, split: Split, drop_last: bool) -> None:
        self.order, self.batch, self.slots, self.split = order, batch, slots, split
        self.steps = order.n // batch if drop_last else -(-order.n // batch)
        self._full = split.cut(batch, slots)
        self._full_sizes = [last - first for first, last in self._full]
        self._window: tuple[int, int, Ids] = (-1, 0, np.empty(0, dtype=np.int64))

    def _cut(self, step: int) -> list[Range]:
        size = min(self.batch, self.order.n - step * self.batch)
        return self._full if size == self.batch else self.split.cut(size, self.slots)

    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        first, last = self._cut(step)[slot]
        base = step * self.batch
        known_epoch, start, window = self._window
        if known_epoch != epoch or not (start <= base + first and base + last <= start + len(window)):
            start = base
            window = self.order.ids(epoch, start, start + max(self._AHEAD, self.batch))
            self._window = (epoch, start, window)
        return window[base - start + first : base - start + last]

    def digest(self, epoch: int) -> int:
        return self.order.digest(epoch)

    def sizes(self, epoch: int, step: int) -> list[int]:
        if (step + 1) * self.batch <= self.order.n:
            return self._full_sizes
        return [last - first for first, last in self._cut(step)]


class RowShares(Shares):
    """Each slot goes through its own block of rows (D2); a short block ends early, as empty shares."""

    def __init__(self, n: int, batch: int, slots: int, seed: int, shuffle: bool, drop_last: bool) -> None:
        self.blocks = by_rows(n, slots)
        self.per_step = [last - first for first, last in evenly(batch, slots)]
        if min(self.per_step) < 1:
            raise UsageError(f"--split rows needs a batch of at least the {slots} slots; it is {batch}")
        self.orders: list[Order] = [
            Shuffled(last - first, mix(seed, slot), first) if shuffle else _Block(first, last)
            for slot, (first, last) in enumerate(self.blocks)
        ]
        counts = [
            order.n // size if drop_last else -(-order.n // size)
            for order, size in zip(self.orders, self.per_step, strict=True)
        ]
        self.steps = min(counts) if drop_last else max(counts)

    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        size = self.per_step[slot]
        return self.orders[slot].ids(epoch, step * size, (step + 1) * size)

    def sizes(self, epoch: int, step: int) -> list[int]:
        return [
            max(0, min((step + 1) * size, order.n) - step * size)
            for order, size in zip(self.orders, self.per_step, strict=True)
        ]


class _Block(Order):
    def __init__(self, first: int, last: int) -> None:
        super().__init__(last - first)
        self._first = first

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        return super().ids(epoch, start, stop) + self._first


class GivenBatches(Shares):
    """The batches of a user's own batch sampler, each cut into shares."""

    def __init__(self, batch_sampler: object, slots: int, split: Split, seed: int) -> None:
        self._source, self._slots, self._split, self._seed = batch_sampler, slots, split, seed
        self._epoch, self._flat, self._ends = -1, np.empty(0, dtype=np.int64), [0]
        self.steps = len(batch_sampler)  # type: ignore[arg-type]

    def begin(self, epoch: int) -> None:
        self._draw(epoch)

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        from paceline.data.generators import drawing_from

        for part in (self._source, getattr(self._source, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        with drawing_from(self._source, mix(self._seed, epoch)):
            batches = [np.asarray(list(batch), dtype=np.int64) for batch in self._source]  # type: ignore[attr-defined]
        self._flat = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        self._ends = [0, *np.cumsum([len(batch) for batch in batches]).tolist()]
        self._epoch, self.steps = epoch, len(batches)

    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        self._draw(epoch)
        base, end = self._ends[step], self._ends[step + 1]
        first, last = self._split.cut(end - base, self._slots)[slot]
        return self._flat[base + first : base + last]

    def digest(self, epoch: int) -> int:
        self._draw(epoch)
        return digest_in_order(self._flat, np.asarray(self._ends, dtype=np.int64))

    def sizes(self, epoch: int, step: int) -> list[int]:
        self._draw(epoch)
        size = self._ends[step + 1] - self._ends[step]
        return [last - first for first, last in self._split.cut(size, self._slots)]


class ItemShares(Shares):
    """Loaders whose item is a batch already: one item per slot and step."""

    def __init__(self, order: Order, slots: int) -> None:
        self.order, self.slots = order, slots
        self.steps = -(-order.n // slots)

    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        position = step * self.slots + slot
        return self.order.ids(epoch, position, position + 1)

    def digest(self, epoch: int) -> int:
        return self.order.digest(epoch)

    def sizes(self, epoch: int, step: int) -> list[int]:
        return [1 if step * self.slots + slot < self.order.n else 0 for slot in range(self.slots)]
