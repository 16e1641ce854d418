"""How a loader's samples are dealt to the steps of an epoch: what a receipt is checked against. Pure.

It stands at the head of a run's receipts, so that whoever checks them needs no data set and no script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.data.order import Order, Shuffled
from paceline.data.partition import RowShares
from paceline.data.receipts import CHUNK, Hashes, Table, hashed


@dataclass(frozen=True)
class Dealing:
    kind: str
    """batches: cut here from one order; rows: a block of rows a slot; items: the loader's item is a batch
    already; given: by the user's batch sampler; stream: an IterableDataset, whose ids are the items' places; clients: a
    round is a step, and has the samples of those who took part in it."""
    slots: int
    seed: int
    samples: int = 0
    """Of the data set; unknown (0) for a stream."""
    order: str = ""
    """sequential, shuffled, or sampler: the user's own, known to the script alone."""
    length: int = 0
    """Ids in an epoch, before drop_last; unknown (0) for a stream and for given batches."""
    batch: int = 0
    drop_last: bool = False
    clients: tuple[int, ...] = ()
    """Samples of each client; 0: they are elsewhere."""

    @property
    def ordered(self) -> bool:
        """Whether the ids of a step follow from this description."""
        return self.kind == "stream" or self.order in ("sequential", "shuffled")

    @property
    def steps(self) -> int | None:
        """Batches in an epoch, where that is known."""
        if self.kind == "rows":
            return self.rows().steps
        if self.kind in ("stream", "given"):
            return None
        if self.kind == "clients":
            return 1
        size = self.slots if self.kind == "items" else self.batch
        return self.length // size if self.drop_last else -(-self.length // size)

    @property
    def words(self) -> str:
        known = sorted(size for size in self.clients if size)
        spread = f"{known[0]:,} to {known[-1]:,}" if known[0] < known[-1] else f"{known[0]:,}"
        away = len(self.clients) - len(known)
        elsewhere = f", {away} of them elsewhere" if away else ""
        return f"{len(self.clients)} clients of {spread} samples{elsewhere}, batches of {self.batch}"

    def rows(self) -> RowShares:
        return RowShares(self.samples, self.batch, self.slots, self.seed, self.order == "shuffled", self.drop_last)

    def _lines(self, length: int) -> list[tuple[Order, int]]:
        """The orders that are followed side by side, and how many ids of each a step takes."""
        if self.kind == "rows":
            rows = self.rows()
            return list(zip(rows.orders, rows.per_step, strict=True))
        order = Shuffled(length, self.seed) if self.order == "shuffled" else Order(length)
        return [(order, self.batch if self.kind == "batches" else self.slots)]

    def expected(self, epoch: int, batches: int, length: int | None = None) -> Iterator[Table]:
        """(ids, digest) of the epoch's first batches, some thousand batches at a time.

        `length`: ids of the epoch, where only the stream knows.
        """
        lines = self._lines(self.length if length is None else length)
        at_once = max(1, CHUNK // sum(size for _, size in lines))
        for first in range(0, batches, at_once):
            last = min(first + at_once, batches)
            counts = np.zeros(last - first, dtype=np.int64)
            digests = np.zeros(last - first, dtype=np.uint64)
            for order, size in lines:
                ids = order.ids(epoch, first * size, last * size)
                whole = -(-len(ids) // size)
                counts[:whole] += np.minimum(size, len(ids) - size * np.arange(whole))
                digests[:whole] += _sums(hashed(ids), size)
            yield np.stack([counts, digests.view(np.int64)], axis=1)


def _sums(hashes: Hashes, size: int) -> Hashes:
    """Of each `size` in turn; the last may be fewer."""
    if not len(hashes):
        return hashes
    sums: Hashes = np.add.reduceat(hashes, np.arange(0, len(hashes), size))
    return sums
