"""A piece of shared memory and the way to wait on a word of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import TermEnded

ALIGN = 64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = 202  # x86-64; the transport is offered on no other (its plain stores rely on that memory order)
_libc = ctypes.CDLL(None, use_errno=True)
_SLICE_NS = 10_000_000
_SPINS = 20


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLICE = ctypes.byref(_Timespec(0, _SLICE_NS))


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Segment:
    """A mapping of a descriptor, with typed views. Closing it unmaps once no view is left.

    What is written to a private one is seen through it alone.
    """

    def __init__(self, fd: int, size: int, private: bool = False) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        os.close(fd)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """With a storage of its own: torch cannot save views of several types of one."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self._map, dtype=np.int64, count=count, offset=offset)

    def raw(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]


class Words:
    """Counters that workers wait on: a row for each worker, each word on a cache line of its own."""

    def __init__(
        self, segment: Segment, rank: int, size: int, columns: int, check: Callable[[float, int], None]
    ) -> None:
        self._rank, self._row, self._check = rank, columns * ALIGN, check
        self._address = segment.address
        words = segment.words(0, size * self._row // 8)
        self._columns = [words[column * ALIGN // 8 :: self._row // 8] for column in range(columns)]
        self.waited_s = 0.0

    @staticmethod
    def nbytes(size: int, columns: int) -> int:
        return size * columns * ALIGN

    def write(self, column: int, number: int) -> None:
        self._columns[column][self._rank] = number

    def read(self, column: int) -> list[int]:
        numbers: list[int] = self._columns[column].tolist()
        return numbers

    def say(self, column: int, number: int) -> None:
        """Set the own word and wake whoever waits on it."""
        self.write(column, number)
        address = self._address + self._rank * self._row + column * ALIGN
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, column: int, number: int) -> None:
        """Until every worker's word has reached `number`.

        A short spin that yields the core, then a sleep on the first laggard's word. `check(seconds,
        laggard)` is called at least every 10 ms and ends the wait by raising.
        """
        words = self._columns[column]
        if int(words.min()) >= number:
            return
        start = time.perf_counter()
        for _ in range(_SPINS):
            os.sched_yield()
            if int(words.min()) >= number:
                self.waited_s += time.perf_counter() - start
                return
        for laggard in range(len(words)):
            while (seen := int(words[laggard])) < number:
                try:
                    self._check(time.perf_counter() - start, laggard)
                except TermEnded:
                    # It is gone since we looked. If it came here before, the meeting is complete, for the others too.
                    if int(words[laggard]) >= number:
                        break
                    raise
                # Sleeps only if the word is still what we saw: a wake between the two cannot be missed.
                _libc.syscall(
                    _SYS_FUTEX,
                    ctypes.c_void_p(self._address + laggard * self._row + column * ALIGN),
                    _FUTEX_WAIT,
                    ctypes.c_int(seen & 0x7FFFFFFF),
                    _SLICE,
                    None,
                    0,
                )
        self.waited_s += time.perf_counter() - start
