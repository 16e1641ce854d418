"""Descriptors that must outlive a leader: the board, shared memory, workers' pidfds. No torch in here.

The leader holds them, and so does its standby, which is sent each one before anybody else gets to use
it. A descriptor in a socket's queue outlives its sender.
"""

from __future__ import annotations

import os
from collections.abc import Callable

BOARD = "board"


class Kept:
    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}
        self.on_keep: Callable[[str, int, int], None] = lambda name, fd, size: None
        self.on_release: Callable[[str], None] = lambda name: None

    def keep(self, name: str, fd: int, size: int = 0) -> None:
        """Take over this descriptor."""
        self.release(name)
        self._of[name] = (fd, size)
        self.on_keep(name, fd, size)

    def get(self, name: str) -> tuple[int, int] | None:
        """(descriptor, size), still owned here."""
        return self._of.get(name)

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self._of if name.startswith(prefix)]

    def take(self, name: str) -> int | None:
        """Give the descriptor away, if it is here."""
        found = self._of.pop(name, None)
        return found[0] if found else None

    def release(self, name: str) -> None:
        fd = self.take(name)
        if fd is not None:
            os.close(fd)
            self.on_release(name)

    def close(self) -> None:
        for fd, _ in self._of.values():
            os.close(fd)
        self._of = {}
