"""What a step really delivered, in three numbers: samples, ids, and a digest of the ids. Pure.

The digest is the sum of a hash of each id, modulo 2^64: it does not matter who trained an id, nor in which
order, so the workers' digests are simply added up in a lane of the reduce. A lost, doubled or exchanged id
changes the sum, but for one chance in 2^64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import Ids

Hashes = NDArray[np.uint64]

_KEY = np.uint64(0x9E3779B97F4A7C15)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)
_F1, _F2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_IN_CACHE = 1 << 13
"""Ids hashed at once within a step; of many more, each one takes four times as long (measured)."""
CHUNK = 1 << 20
"""Ids hashed at once by whoever checks a whole epoch."""


def hashed(ids: Ids) -> Hashes:
    """A 64-bit hash of each id: splitmix64, as `order.mix` is, spelt out because a step waits for it."""
    words: Hashes = ids.view(np.uint64) + _KEY
    words ^= words >> _S1
    words *= _F1
    words ^= words >> _S2
    words *= _F2
    words ^= words >> _S3
    return words


def signed(number: int) -> int:
    """A sum modulo 2^64 as a lane holds it.

    >>> signed((1 << 64) - 1), signed(1 << 64), signed(1 << 63)
    (-1, 0, -9223372036854775808)
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def digest(ids: Ids) -> int:
    """
    >>> digest(np.array([3, 1, 2])) == signed(digest(np.array([1])) + digest(np.array([2, 3])))
    True
    """
    return signed(int(np.add.reduce(hashed(ids))))


def digest_of_all(n: int, advance: Callable[[int], object] = lambda ids: None) -> int:
    """The digest of every id below n, in little memory; `advance` hears how many were added."""
    total = 0
    for start in range(0, n, CHUNK):
        ids = np.arange(start, min(start + CHUNK, n), dtype=np.int64)
        total += digest(ids)
        advance(len(ids))
    return signed(total)


class Tally(NamedTuple):
    """What one worker, or all of them, took in one step."""

    samples: int
    ids: int
    digest: int

    @staticmethod
    def of(samples: int, pieces: Sequence[Ids]) -> Tally:
        """From the ids of each share: hashed together, because a call of numpy costs more than 64 ids."""
        if not pieces:
            return NO_TALLY
        ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return Tally(samples, len(ids), digest(ids))

    @staticmethod
    def total(rows: NDArray[np.int64]) -> Tally:
        """Of all workers, from their lanes; the digests wrap around as they should."""
        return Tally(*rows.sum(axis=0).tolist())


NO_TALLY = Tally(0, 0, 0)


class Loose(NamedTuple):
    """A tally of a step in which nobody is met: the digest of its ids can wait until it is written."""

    samples: int
    ids: int
    digest: Ids


OWN_DRAWS = -1
"""In the place of a loader's number: the script drew its own batches, and an id is a share's number."""


class Receipt(NamedTuple):
    """One step of a run."""

    step: int
    epoch: int
    loader: int
    """Which of the run's loaders, in the order of prepare(); or OWN_DRAWS."""
    batch: int
    """Which of the loader's batches in this epoch; with own draws, how many shares the step was cut into."""
    samples: int
    ids: int
    digest: int | Ids
    """Or the ids that it is still to be taken of."""


STEP, EPOCH, LOADER, BATCH, SAMPLES, IDS, DIGEST = range(len(Receipt._fields))
"""Columns of a table of receipts."""
Table = NDArray[np.int64]


def table(receipts: Sequence[Any]) -> Table:
    """Receipts as rows of an array."""
    return np.array(receipts, dtype=np.int64).reshape(-1, len(Receipt._fields))


def _digests(pieces: Sequence[Ids]) -> list[int]:
    starts = np.cumsum([0, *map(len, pieces[:-1])])
    digests: list[int] = np.add.reduceat(hashed(np.concatenate(pieces)), starts).view(np.int64).tolist()
    return digests


def settled(receipts: Sequence[Receipt]) -> Table:
    """The same with all digests taken. Many at once: by itself, each costs 20 µs within a step (measured), here 1."""
    loose = [receipt.digest for receipt in receipts if not isinstance(receipt.digest, int)]
    together = max(1, _IN_CACHE // max(map(len, loose), default=1))
    digests = chain.from_iterable(_digests(loose[at : at + together]) for at in range(0, len(loose), together))
    return table([(*r[:DIGEST], r.digest if isinstance(r.digest, int) else next(digests)) for r in receipts])
