"""The one authority of a run on one machine: who leads it, and what its leader has decided.

A small SQLite file. Each leader has a fence, a number that only grows: whoever takes over raises it,
and from then on nothing that an older leader writes is taken. A view exists once it is in here; it is
announced afterwards. The file lies in memory (XDG_RUNTIME_DIR or /dev/shm), so that no checkpoint can
fill its disk. No torch in here.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.membership import View
from paceline.errors import UsageError

_SHARED = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "9p", "afs", "beegfs", "gluster", "ocfs")
_TABLES = """
CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), fence INTEGER NOT NULL, pid INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE views (term INTEGER PRIMARY KEY, fence INTEGER NOT NULL, members TEXT NOT NULL);
"""


class FencedError(Exception):
    """Another agent leads the run now: nothing this one writes counts any more."""


@dataclass(frozen=True)
class Record:
    fence: int
    pid: int
    """The leader's process."""
    state: bytes


def runtime_folder() -> Path:
    """Where small files that live no longer than a run belong."""
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if name and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path(tempfile.gettempdir())


def file_system(path: Path) -> str:
    """The kind of file system that a path lies on."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, rest = line.split(" - ", 1)
        mount = fields.split()[4]
        if len(mount) >= len(best) and (path.resolve().is_relative_to(mount)):
            best, kind = mount, rest.split()[0]
    return kind


class Store:
    """Open it in each process that uses it; every call is one transaction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kind = file_system(path)
        if kind.startswith(_SHARED):
            raise UsageError(
                f"{path} lies on a shared disk ({kind}), where locks do not hold: point XDG_RUNTIME_DIR to a local folder"
            )
        # Nothing here outlives the machine, so nothing is synced; a killed process leaves whole transactions.
        self._db = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")

    @classmethod
    def create(cls, path: Path) -> Store:
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        store = cls(path)
        store._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} INSERT INTO run VALUES (1, 0, 0, x''); COMMIT;")
        return store

    def read(self) -> Record:
        fence, pid, state = self._db.execute("SELECT fence, pid, state FROM run").fetchone()
        return Record(fence, pid, state)

    def lead(self, after: int, pid: int) -> int:
        """Take over from the leader whose fence was `after`; the own fence. FencedError: another was faster."""
        changed = self._db.execute("UPDATE run SET fence = fence + 1, pid = ? WHERE fence = ?", (pid, after)).rowcount
        if not changed:
            raise FencedError(f"the run is led by another agent than that of fence {after}")
        return after + 1

    def write(self, fence: int, state: bytes, views: Sequence[View] = ()) -> None:
        """What the leader has decided, before anybody is told: its state and its new views."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if not self._db.execute("UPDATE run SET state = ? WHERE fence = ?", (state, fence)).rowcount:
                raise FencedError(f"another agent leads the run; fence {fence} is over")
            for view in views:
                members = ",".join(map(str, view.members))
                self._db.execute("INSERT INTO views VALUES (?, ?, ?)", (view.term, fence, members))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def views(self) -> list[View]:
        rows = self._db.execute("SELECT term, members FROM views ORDER BY term").fetchall()
        return [View(term, tuple(int(member) for member in members.split(",") if member)) for term, members in rows]

    def close(self) -> None:
        self._db.close()

    def remove(self) -> None:
        self.close()
        for suffix in ("", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
