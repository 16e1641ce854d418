"""A disk that is full or read-only, for tests: a small one of its own where it can be mounted."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """Of two megabytes. Where nothing can be mounted, the limit on a file's size stands in for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mounted = _call("mount", "-t", "tmpfs", "-o", "size=2m", "paceline-test", str(path))
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if self._mounted:
            with open(self.path / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    return
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limit[1]))

    def make_read_only(self) -> None:
        if self._mounted:
            assert _call("mount", "-o", "remount,ro", str(self.path))
        else:
            self.fill()

    def free(self) -> None:
        if self._mounted:
            assert _call("mount", "-o", "remount,rw", str(self.path))
            (self.path / "filler").unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)

    def close(self) -> None:
        self.free()
        if self._mounted:
            assert _call("umount", str(self.path))


def _call(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.close()
