"""The order in which an epoch visits its samples: a pure function of (seed, epoch, position).

Nothing of the data set's size is ever held in memory: a shuffle is a keyed bijection on [0, n) that
can be asked for any position, so a resume or a moved share costs nothing and sets of 10^10 samples
are fine.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Ids = NDArray[np.int64]
_Words = NDArray[Any]

_ROUNDS = 6
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One well-stirred 63-bit number from several: the seed of everything that must be repeatable."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class Width:
    """Words of so many bits, and a finisher that stirs them (splitmix64's; lowbias32)."""

    bits: int
    dtype: Any
    shifts: tuple[int, int, int]
    factors: tuple[int, int]

    def mix(self, words: _Words, key: int) -> _Words:
        """`mix` over an array, for one key."""
        one = self.dtype
        words = words + one(key & ((1 << self.bits) - 1))
        for shift, factor in zip(self.shifts, self.factors, strict=False):
            words ^= words >> one(shift)
            words *= one(factor)
        words ^= words >> one(self.shifts[2])
        return words

    def moved(self, half: _Words, by: _Words, size: int) -> _Words:
        """half + by, modulo size (at most half the bits long), without a division: those are ten times as slow."""
        shift, limit = self.dtype(self.bits // 2), self.dtype(size)
        by >>= shift
        by *= limit
        by >>= shift
        by += half
        wrapped: _Words = np.minimum(by, by - limit)  # below the limit, the difference wraps to something huge
        return wrapped


_WIDE = Width(64, np.uint64, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_NARROW = Width(32, np.uint32, (16, 15, 16), (0x7FEB352D, 0x846CA68B))
"""Four times as fast, where a position fits."""


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, number) for number in range(_ROUNDS))


def _stir(positions: _Words, rows: int, columns: int, key: int, width: Width) -> _Words:
    """A bijection on [0, rows * columns): each half in turn moves by a hash of the other."""
    b = width.dtype(columns)
    left = positions // b
    right = positions - left * b
    for number, round_key in enumerate(_round_keys(key)):
        if number % 2:
            right = width.moved(right, width.mix(left, round_key), columns)
        else:
            left = width.moved(left, width.mix(right, round_key), rows)
    stirred: _Words = left * b + right
    return stirred


def shuffled(positions: Ids, n: int, key: int) -> Ids:
    """Where a shuffle of [0, n) under `key` sends these positions."""
    if n < 2:
        return positions.copy()
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    width = _NARROW if rows * columns < 1 << 32 else _WIDE
    words = _stir(positions.astype(width.dtype), rows, columns, key, width)
    # The grid is larger than n by less than one row: the few that land outside walk on.
    outside = words >= width.dtype(n)
    while outside.any():
        words[outside] = _stir(words[outside], rows, columns, key, width)
        outside = words >= width.dtype(n)
    return words.astype(np.int64)


class Order:
    """The samples of each epoch, by position: ``ids(epoch, start, stop)``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        return np.arange(start, min(stop, self.n), dtype=np.int64)

    def digest(self, epoch: int) -> int:
        """Of an order that only a user's sampler knows; 0 where it follows from the run's settings."""
        return 0


def digest_in_order(*parts: Ids) -> int:
    """Of ids as they stand: any other order gives another number. Never 0.

    >>> digest_in_order(np.array([1, 2])) == digest_in_order(np.array([2, 1]))
    False
    """
    total = hashlib.blake2b(digest_size=7)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part.tobytes())
    return int.from_bytes(total.digest(), "little") | 1 << 56


class Shuffled(Order):
    """Every sample once an epoch, in a new order each epoch."""

    def __init__(self, n: int, seed: int, first: int = 0) -> None:
        super().__init__(n)
        self.seed, self.first = seed, first

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        positions = super().ids(epoch, start, stop)
        return shuffled(positions, self.n, mix(self.seed, epoch)) + self.first


class Sampled(Order):
    """The order of a user's own sampler, drawn once an epoch under the epoch's seed."""

    def __init__(self, sampler: Any, seed: int) -> None:
        try:
            n = len(sampler)
        except TypeError:
            raise UsageError(f"the sampler {type(sampler).__name__} has no length: give it __len__") from None
        super().__init__(n)
        self._sampler, self._seed, self._epoch = sampler, seed, -1
        self._drawn: Ids = np.empty(0, dtype=np.int64)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        return self._of(epoch)[start:stop]

    def digest(self, epoch: int) -> int:
        return digest_in_order(self._of(epoch))

    def _of(self, epoch: int) -> Ids:
        if epoch != self._epoch:
            from paceline.data.generators import drawing_from

            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            with drawing_from(self._sampler, mix(self._seed, epoch)):
                self._drawn = np.fromiter((int(i) for i in self._sampler), dtype=np.int64)
            self._epoch = epoch
        return self._drawn
