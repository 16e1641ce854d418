"""Memory of a process's own for large stretches of bytes."""

from __future__ import annotations

import mmap
from contextlib import suppress


def on_huge_pages(size: int) -> mmap.mmap:
    """On whole pages, so that it can go straight to a disk; on huge ones, where the system has them: fewer to look up,
    which costs twice in a virtual machine. Private: a shared mapping is a file's, and those rarely get huge ones."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
