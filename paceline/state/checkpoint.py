"""Checkpoints: the run's state in files, whole or not at all. No torch in here: the agent picks one to resume from.

A checkpoint is one file, `checkpoints/step-00000120.ckpt`: a mark, the sha256 of the rest, a snapshot's
bytes. It appears under its name only once it is complete and on the disk; the newest few are kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MARK = b"PACELIN1"
_HEAD = len(_MARK) + 32
_NAME = re.compile(r"step-(\d+)\.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def read(self) -> memoryview:
        """The snapshot's bytes; raises ValueError, with the reason, if they are not what was written."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror}") from None
        if len(data) < _HEAD or data[: len(_MARK)] != _MARK:
            raise ValueError(f"{self.path} is no checkpoint, or only the beginning of one")
        body = memoryview(data)[_HEAD:]
        if hashlib.sha256(body).digest() != data[len(_MARK) : _HEAD]:
            raise ValueError(f"{self.path} is damaged: its checksum does not fit")
        return body


def listed(folder: Path) -> list[Checkpoint]:
    """A run's checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    return sorted((Checkpoint(path, int(match[1])) for path, match in found if match), key=lambda c: c.step)


def newest_good(folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that can be read; each one passed over is told about."""
    for checkpoint in reversed(listed(folder)):
        try:
            checkpoint.read()
        except ValueError as error:
            tell(f"{error}; trying the one before")
            continue
        return checkpoint
    return None


class Writer:
    """Writes checkpoints beside the training, one at a time. An error is told and ends nothing."""

    def __init__(
        self, folder: Path, keep: int, tell: Callable[[str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        """`before`: what has to be on the disk first."""
        self._folder, self._keep, self._tell, self._before = folder, keep, tell, before
        self._thread: threading.Thread | None = None

    def write(self, step: int, body: bytearray) -> None:
        """Begin to write these bytes, which must not change any more; waits for the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, body), name="paceline-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, body: bytearray) -> None:
        path = self._folder / f"step-{step:08d}.ckpt"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._before()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(_MARK + hashlib.sha256(body).digest())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            self._sync_folder()
            for old in listed(self._folder)[: -self._keep]:
                old.path.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._tell(f"no checkpoint at step {step}: {error.strerror}; training goes on, older checkpoints stay")

    def _sync_folder(self) -> None:
        """So that the new name outlives a power cut too."""
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
