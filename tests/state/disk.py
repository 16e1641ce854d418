"""A disk that is full or read-only, for tests: a small one of its own where it can be mounted."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """Where nothing can be mounted, the limit on a file's size stands in for it, in the process that asks."""

    def __init__(self, path: Path, mounted: bool) -> None:
        self.path, self.mounted = path, mounted
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if self.mounted:
            with open(self.path / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    return
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limit[1]))

    def make_read_only(self) -> None:
        if self.mounted:
            assert _call("mount", "-o", "remount,ro", str(self.path))
        else:
            self.fill()

    def free(self) -> None:
        if self.mounted:
            assert _call("mount", "-o", "remount,rw", str(self.path))
            (self.path / "filler").unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)


def _call(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def small_disk(path: Path, megabytes: int = 2) -> Iterator[Disk]:
    path.mkdir()
    mounted = _call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "paceline-test", str(path))
    disk = Disk(path, mounted)
    try:
        yield disk
    finally:
        disk.free()
        if mounted:
            assert _call("umount", str(path))
