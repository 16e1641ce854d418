"""The receipts of a run in files: `receipts/lineage-000.bin`, one a lineage. No torch in here.

A lineage is a stretch of a run from its start, or from a resume, to wherever it ended. Its file is one line
of JSON (what the receipts are about, and the lineage's first step), then one record of fixed size a step, in the
place that belongs to the step. So writing a receipt twice changes nothing, and a step that was never written
is a hole. What a resume trains again stands in its own lineage, and hides the older one's steps from there on.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.dealing import Dealing
from paceline.data.receipts import STEP, Receipt, Table, settled, table
from paceline.folder import write_atomically

_RECORD_BYTES = 8 * len(Receipt._fields)
_NAME = re.compile(r"lineage-(\d+)\.bin")
_KEPT = 256
"""Receipts in the memory of each worker: for whoever becomes main, and for as long as a disk is full."""
_AT_ONCE, _EVERY_S = 64, 0.1
"""Main writes so many receipts together, or after so long: a write costs 10 µs, and a step may take 200."""


@dataclass(frozen=True)
class Head:
    """What the receipts of a lineage are about."""

    first: int
    """The step that it begins with."""
    seed: int
    dealings: tuple[Dealing, ...]
    """Of each loader, in the order of prepare()."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def read(line: bytes) -> Head:
        """Raises ValueError where it is none."""
        try:
            known = json.loads(line)
            dealings = [Dealing(**dealing | {"clients": tuple(dealing["clients"])}) for dealing in known["dealings"]]
            return Head(known["first"], known["seed"], tuple(dealings))
        except (KeyError, TypeError) as error:
            raise ValueError(f"its head is not one of receipts ({error})") from None


def _listed(folder: Path) -> list[tuple[int, Path]]:
    """Lineages and their files, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


class Ledger:
    """Receipts as they come. Every worker remembers the last ones; main writes them."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self.lineage = -1
        """Which one this is; -1 before it has begun."""
        self.head = Head(0, 0, ())
        self._recent: deque[Receipt] = deque(maxlen=_KEPT)
        self._fd, self._start = -1, 0
        self._written_s = 0.0
        self._told = False

    def next_lineage(self) -> int:
        known = _listed(self._folder)
        return known[-1][0] + 1 if known else 0

    def begin(self, lineage: int, head: Head) -> None:
        self.lineage, self.head = lineage, head
        self._recent.clear()

    @property
    def recent(self) -> list[Receipt]:
        """What may not be in the file yet, as far as this worker knows."""
        return list(self._recent)

    def remember(self, receipts: Iterable[Receipt]) -> None:
        """Another worker's recent ones, up to here."""
        self._recent.clear()
        self._recent.extend(receipts)

    def add(self, receipt: Receipt) -> bool:
        """A step is committed; whether main should write now. What it has not when it dies, the next one remembers."""
        self._recent.append(receipt)
        many = len(self._recent) >= _AT_ONCE and not self._told  # a full disk is asked now and then only
        return many or time.monotonic() - self._written_s > _EVERY_S

    def write(self) -> None:
        """Main's: whatever may not be in the file yet. Never raises: a full disk must not end a run."""
        self._written_s = time.monotonic()
        if not self._recent:
            return
        try:
            if self._fd < 0:
                self._open()
            records = settled(self.recent).astype("<i8").tobytes()
            at = self._start + (self._recent[0].step - self.head.first) * _RECORD_BYTES
            if os.pwrite(self._fd, records, at) < len(records):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)
        else:
            self._recent.clear()

    def _open(self) -> None:
        """The lineage's file; this worker may not be the first to write to it."""
        path = self._folder / f"lineage-{self.lineage:03d}.bin"
        if not path.exists():
            write_atomically(path, self.head.line())
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with open(path, "rb") as file:
            self._start = len(file.readline())

    def sync(self) -> None:
        """To the disk, before a checkpoint: what a resume goes on from has its receipts, power cut or not."""
        try:
            if self._fd >= 0:
                os.fdatasync(self._fd)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._told:
            self._tell(
                f"no receipt at step {self._recent[-1].step if self._recent else 0}: {error.strerror}; training goes on, "
                "but `paceline verify` may find receipts missing"
            )
        self._told = True

    def close(self) -> None:
        """Main's, at the end: write what another main may have died over, and let go of the file."""
        self.write()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Lineage:
    head: Head
    receipts: Table
    """Those that were written, in the order of steps."""


@dataclass(frozen=True)
class Book:
    """All receipts of a run."""

    lineages: tuple[Lineage, ...]

    @property
    def resumes(self) -> list[int]:
        """The steps at which the run was resumed."""
        return [lineage.head.first for lineage in self.lineages[1:]]

    def table(self) -> Table:
        """One receipt a step: the newest lineage's."""
        rows = table([])
        for lineage in self.lineages:
            rows = np.concatenate([rows[rows[:, STEP] < lineage.head.first], lineage.receipts])
        return rows


def read(folder: Path) -> Book:
    """Raises ValueError, with the reason, where a file cannot be understood."""
    return Book(tuple(_read(path) for _, path in _listed(folder)))


def _read(path: Path) -> Lineage:
    try:
        line, _, body = path.read_bytes().partition(b"\n")
        head = Head.read(line)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    count = len(body) // _RECORD_BYTES  # half a record at the end was never finished
    rows: Any = np.frombuffer(body, dtype="<i8", count=count * len(Receipt._fields)).reshape(count, -1)
    return Lineage(head, table(rows[rows.any(axis=1)]))
