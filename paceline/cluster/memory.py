"""Shared memory on demand: made by the agent, handed out by descriptor. No torch in here.

memfd, not /dev/shm: a named segment is unlinked under the living when an attached process is killed
(measured), and containers often give /dev/shm 64 MB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.kept import Kept
from paceline.wires.messages import Granted, Refused


def available_bytes() -> int:
    """What the machine (or this process's cgroup) can still give."""
    free = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()) + _cached())
    except (OSError, ValueError):
        pass
    return free


def _cached() -> int:
    """Page cache of the cgroup, which the kernel gives back when asked."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def words(size: int) -> str:
    """1536 → '1.5 KiB'"""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


_PREFIX = "segment/"
_STRETCH = 256 << 20  # bytes: about a tenth of a second
_NAME = re.compile(r"(?:(?:group|state)-(\d{1,9})|replica-\d{1,9}|kept-\d{1,9}|seats-\d{1,9})(?:[-/].*)?")


def term_of(segment: str) -> int | None:
    """The term whose group asked for this segment; a replica's, and what a codec keeps, is for the whole run.

    >>> term_of("group-3/memory-1"), term_of("state-4"), term_of("replica-0/1"), term_of("kept-0-4-1040"), term_of("seats-4-64")
    (3, 4, None, None, None)
    """
    found = _NAME.fullmatch(segment)
    if found is None:
        raise ValueError(f"{segment!r} is no name of a segment")
    return int(found[1]) if found[1] else None


class Segments:
    """Segments by name; the first who asks makes one, the rest share it."""

    def __init__(self, limit: int, kept: Kept, alive: Callable[[], None] = lambda: None) -> None:
        """`alive` is called while pages are taken: of many GB that may last longer than a lease."""
        self._limit, self._kept, self._alive = limit, kept, alive

    def grant(self, name: str, size: int, workers: int) -> tuple[Granted | Refused, int | None]:
        found = self._kept.get(_PREFIX + name)
        if found is not None:
            fd, known = found
            if known != size:
                return Refused(f"workers disagree on the size of {name}: {known} and {size} bytes"), None
            return Granted(size), fd
        free = available_bytes()
        if self._limit:
            free = min(free, self._limit - self._taken)
        if size > free:
            return Refused(
                f"shared memory is too small: {workers} workers need {words(size)} for their gradients, {words(max(0, free))} "
                "is free. Use fewer workers, raise --shm-limit or the container's memory, or pass --transport gloo"
            ), None
        fd = os.memfd_create(f"paceline-{name.replace('/', '-')}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            # Take the pages now: running out later would be a SIGBUS in the middle of a step.
            for first in range(0, size, _STRETCH):
                self._alive()
                os.posix_fallocate(fd, first, min(_STRETCH, size - first))
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            return Refused(
                f"no shared memory: {words(size)} asked for, the kernel said {error.strerror}. Use fewer workers, or pass "
                "--transport gloo"
            ), None
        self._kept.keep(_PREFIX + name, fd, size)
        return Granted(size), fd

    @property
    def _taken(self) -> int:
        sizes = [self._kept.get(name) for name in self._kept.names(_PREFIX)]
        return sum(found[1] for found in sizes if found)

    def forget_before(self, settled: int, pending: bool) -> None:
        """Let go of what nobody will ask for again in this term; who has a segment mapped keeps it."""
        for kept in self._kept.names(_PREFIX):
            name = kept.removeprefix(_PREFIX)
            term = term_of(name)
            if term is None:
                continue
            handed_over = name.startswith("state-") and not pending and term <= settled
            if handed_over or term < settled - 1:
                self._kept.release(kept)
