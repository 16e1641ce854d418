"""64-bit ids to small numbers, for many ids at once.

An `Index` gives every id that is added a number: 0, 1, 2, …, and those of removed ones again. It is a hash table with
open addressing whose cells hold numbers; each round of a search looks at one cell for every id that is not settled yet.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Ids = NDArray[np.int64]
Numbers = NDArray[np.int64]
_EMPTY, _REMOVED = -1, -2
_LEAST = 1024
_ROOM = 4
"""Cells for each id, at least. A search goes on as long as its unluckiest id does: of a thousand, with two cells an id about
twice as long as with four."""


def mixed(ids: Ids, salt: int = 0) -> NDArray[np.uint64]:
    """A bijection under which ids of any kind look drawn at random (the finalizer of SplitMix64)."""
    x = ids.view(np.uint64) + np.uint64(salt & (1 << 64) - 1)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Grown:
    """An array that grows in place: its pages are moved, not copied, and only those that were written take memory."""

    def __init__(self, dtype: DTypeLike, *width: int) -> None:
        """Of single values, or of rows so wide."""
        self._dtype, self._width = np.dtype(dtype), width
        self._bytes = self._dtype.itemsize * math.prod(width)
        self._take(_fresh(self._bytes * _LEAST))

    def _take(self, memory: mmap.mmap) -> None:
        self._map = memory
        self.array: NDArray[Any] = np.frombuffer(memory, dtype=self._dtype).reshape(-1, *self._width)
        """Until the next call of `reserve`: a view of it that is kept over one shows the past."""

    def reserve(self, count: int) -> None:
        """Room for so many elements and a quarter more; what is not written to costs nothing."""
        if count <= len(self.array):
            return
        memory, size = self._map, (count + count // 4) * self._bytes
        del self.array
        try:
            memory.resize(size)
        except BufferError:  # a view is kept, perhaps by the traceback of an exception: it keeps the old memory
            memory = _fresh(size)
            memory[: len(self._map)] = self._map[:]
        self._take(memory)


def _fresh(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Index:
    def __init__(self) -> None:
        self.top = 0
        """All numbers given out are below."""
        self._cells = np.full(_LEAST, _EMPTY, dtype=np.int32)
        self._filled = 0
        self._ids, self._touched = Grown(np.int64), Grown(np.int32)
        self._free: Numbers = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.top - len(self._free)

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes + 12 * self.top + self._free.nbytes

    @property
    def ids(self) -> Ids:
        return self._ids.array[: self.top]

    @property
    def touched(self) -> NDArray[np.int32]:
        """By number, when it was touched last; less than zero where the number is free."""
        return self._touched.array[: self.top]

    def find(self, ids: Ids) -> Numbers:
        """Each id's number, or -1."""
        numbers = np.full(len(ids), -1, dtype=np.int64)
        rest: Numbers | None = None  # all of them
        at = self._first(ids)
        while len(ids):
            found = self._cells.take(at)
            match = self._ids.array.take(found, mode="clip") == ids
            match &= found >= 0
            numbers[match if rest is None else rest[match]] = found[match]
            on = np.flatnonzero(~match & (found != _EMPTY))
            rest = on if rest is None else rest[on]
            ids, at = ids[on], (at[on] + 1) & (len(self._cells) - 1)
        return numbers

    def add(self, ids: Ids) -> Numbers:
        """Numbers for ids that are distinct and not there yet."""
        if _ROOM * (self._filled + len(ids)) > len(self._cells):
            self._rebuild(len(self) + len(ids))
        reused = min(len(ids), len(self._free))
        numbers = np.concatenate(
            (self._free[len(self._free) - reused :], np.arange(self.top, self.top + len(ids) - reused))
        )
        self._free = self._free[: len(self._free) - reused].copy()
        self.top += len(ids) - reused
        self._ids.reserve(self.top)
        self._touched.reserve(self.top)
        self.ids[numbers], self.touched[numbers] = ids, 0
        self._place(ids, numbers)
        return numbers

    def remove(self, numbers: Numbers) -> None:
        ids = self.ids[numbers]
        self._cells[self._cell_of(ids, numbers)] = _REMOVED
        self.touched[numbers] = -1
        self._free = np.concatenate((self._free, numbers))

    def _first(self, ids: Ids) -> Numbers:
        return (mixed(ids) & np.uint64(len(self._cells) - 1)).view(np.int64)

    def _cell_of(self, ids: Ids, numbers: Numbers) -> Numbers:
        cells, rest = self._first(ids), np.arange(len(ids))
        while len(rest := rest[self._cells.take(cells[rest]) != numbers[rest]]):
            cells[rest] = (cells[rest] + 1) & (len(self._cells) - 1)
        return cells

    def _place(self, ids: Ids, numbers: Numbers) -> None:
        """Each number into the first empty cell on its id's way; of several that meet at one, one gets it."""
        self._filled += len(ids)
        at = self._first(ids)
        while len(at):
            empty = self._cells.take(at) == _EMPTY
            self._cells[at[empty]] = numbers[empty]
            on = np.flatnonzero(self._cells.take(at) != numbers)
            at, numbers = (at[on] + 1) & (len(self._cells) - 1), numbers[on]

    def _rebuild(self, count: int) -> None:
        """With room for so many, between half and all of it taken, and without what was removed."""
        self._cells = np.full(max(_LEAST, 1 << (_ROOM * count - 1).bit_length()), _EMPTY, dtype=np.int32)
        self._filled = 0
        live = np.flatnonzero(self.touched >= 0)
        self._place(self.ids[live], live)
