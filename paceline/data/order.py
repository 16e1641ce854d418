"""The order in which an epoch visits its samples: a pure function of (seed, epoch, position).

Nothing of the data set's size is ever held in memory: a shuffle is a keyed bijection on [0, n) that
can be asked for any position, so a resume or a moved share costs nothing and sets of 10^10 samples
are fine.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 6
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
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


def mix_array(words: _Words, key: int) -> _Words:
    """`mix` over an array, for one key (splitmix64's finisher)."""
    words = words + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * _M1
    words = (words ^ (words >> np.uint64(27))) * _M2
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, number) for number in range(_ROUNDS))


def _moved(half: _Words, by: _Words, size: np.uint64) -> _Words:
    """half + by, modulo size (below 2**32), without a division: those are ten times as slow."""
    half = half + (((by >> np.uint64(32)) * size) >> np.uint64(32))
    half -= size * (half >= size)
    return half


def _stir(positions: _Words, rows: int, columns: int, key: int) -> _Words:
    """A bijection on [0, rows * columns): each half in turn moves by a hash of the other."""
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = positions // b, positions % b
    for number, round_key in enumerate(_round_keys(key)):
        if number % 2:
            right = _moved(right, mix_array(left, round_key), b)
        else:
            left = _moved(left, mix_array(right, round_key), a)
    return left * b + right


def shuffled(positions: Ids, n: int, key: int) -> Ids:
    """Where a shuffle of [0, n) under `key` sends these positions."""
    if n < 2:
        return positions.copy()
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    words = _stir(positions.astype(np.uint64), rows, columns, key)
    # The grid is larger than n by less than one row: the few that land outside walk on.
    outside = words >= np.uint64(n)
    while outside.any():
        words[outside] = _stir(words[outside], rows, columns, key)
        outside = words >= np.uint64(n)
    return words.astype(np.int64)


class Order:
    """The samples of each epoch, by position: ``ids(epoch, start, stop)``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        return np.arange(start, min(stop, self.n), dtype=np.int64)


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
        if epoch != self._epoch:
            from paceline.data.random import seeded

            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            with seeded(mix(self._seed, epoch)):
                self._drawn = np.fromiter((int(i) for i in self._sampler), dtype=np.int64)
            self._epoch = epoch
        return self._drawn[start:stop]
