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
    """A mapping of a descriptor, with typed views. Closing it unmaps once no view is left."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(fd, size)
        os.close(fd)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        return self._bytes[offset : offset + size].view(dtype)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self._map, dtype=np.int64, count=count, offset=offset)

    def raw(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]


def wake(address: int) -> None:
    """Wake whoever waits on the 32-bit word at this address."""
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 1 << 30, None, None, 0)


def wait_until(
    words: NDArray[np.int64], address: int, stride: int, number: int, check: Callable[[float, int], None]
) -> float:
    """Wait until every word has reached `number`; return the seconds it took.

    A short spin that yields the core, then a sleep on the first laggard's word. `check(seconds,
    laggard)` is called at least every 10 ms and ends the wait by raising.
    """
    start = time.perf_counter()
    for _ in range(_SPINS):
        if int(words.min()) >= number:
            return time.perf_counter() - start
        os.sched_yield()
    for laggard in range(len(words)):
        while (seen := int(words[laggard])) < number:
            check(time.perf_counter() - start, laggard)
            # Sleeps only if the word is still what we saw: a wake between the two cannot be missed.
            _libc.syscall(
                _SYS_FUTEX,
                ctypes.c_void_p(address + laggard * stride),
                _FUTEX_WAIT,
                ctypes.c_int(seen & 0x7FFFFFFF),
                _SLICE,
                None,
                0,
            )
    return time.perf_counter() - start
