"""Shared memory that a worker may change without the others seeing it.

It is mapped twice: shared, for those who write it, and private, for this worker's script. The kernel
copies a page of the private mapping when the script first writes to it, by whatever way (torch, `.data`,
numpy); all other pages are the shared ones and cost nothing. A copied page no longer follows the shared
memory, so it has to be brought up to date each time that has been written.

Which pages were copied, the kernel tells exactly. Asking for 23 MB takes 0.15 ms; to drop all pages
instead and have them mapped again took 1.6 ms and more (measured).
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from paceline.tensors.segment import Segment

_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"  # eight bytes a page
_OF_FILE, _KIND = 1, np.uint64(61)
"""The highest bits of an entry: in memory, swapped out, and below them: the file's, so not a copy."""


class Mirror:
    def __init__(self, fd: int, size: int) -> None:
        """`fd`: `needs(size)` bytes of memory."""
        whole = Mirror.needs(size)
        self.shared, self.own = Segment(os.dup(fd), whole), Segment(fd, whole, private=True)
        self._shared_pages, self._own_pages = (
            segment.words(0, whole // 8).reshape(-1, _PAGE // 8) for segment in (self.shared, self.own)
        )
        # The last page is none of the caller's. We write it: if the kernel does not say so, nothing it says counts.
        self._own_pages[-1] = 1
        self._entries = bytearray(len(self._own_pages) * 8)
        self._copied = np.zeros(0, dtype=np.bool_)

    @staticmethod
    def needs(size: int) -> int:
        return (-(-size // _PAGE) + 1) * _PAGE

    def look(self) -> float:
        """Find the pages that the script has written; their share of all."""
        copied = _copied(self._entries) if self._read_entries() else np.zeros(1, dtype=np.bool_)
        self._copied = copied if copied[-1] else np.ones(len(self._own_pages), dtype=np.bool_)
        return (np.count_nonzero(self._copied) - 1) / max(1, len(self._copied) - 1)

    def _read_entries(self) -> bool:
        """False where the kernel keeps it to itself (no /proc; a process that may not be traced)."""
        try:
            # Opened anew each time: a forked child that had the descriptor would read its parent's pages.
            fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.preadv(fd, [self._entries], self.own.address // _PAGE * 8) == len(self._entries)
            finally:
                os.close(fd)
        except OSError:
            return False

    def catch_up(self) -> None:
        """Bring the pages found by `look` up to date. Nobody may be writing the shared memory."""
        for start, stop in _runs(self._copied[:-1]):
            self._own_pages[start:stop] = self._shared_pages[start:stop]


def _copied(entries: bytearray) -> NDArray[np.bool_]:
    """Which pages are there, in memory or swapped out, and not the file's."""
    kind = np.frombuffer(entries, dtype=np.uint64) >> _KIND
    copied: NDArray[np.bool_] = (kind > _OF_FILE) & (kind & _OF_FILE == 0)
    return copied


def _runs(flags: NDArray[np.bool_]) -> list[list[int]]:
    """Where flags are set, as stretches [start, stop].

    >>> _runs(np.array([True, False, True, True]))
    [[0, 1], [2, 4]]
    """
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    runs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return runs
