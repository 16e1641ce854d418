"""The one authority of a run: who leads it, and what its leader has decided.

Each leader has a fence, a number that only grows: whoever takes over raises it, and from then on nothing
that an older leader writes is taken. A view exists once it is in here; it is announced afterwards.

    LocalStore   one machine: a small SQLite file in memory (XDG_RUNTIME_DIR or /dev/shm), so that no
                 checkpoint can fill its disk
    EtcdStore    several machines (`etcd.py`)

No torch in here.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.wires.view import View

_SHARED = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "9p", "afs", "beegfs", "gluster", "ocfs")
_TABLES = """
CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), fence INTEGER NOT NULL, pid INTEGER NOT NULL,
    address TEXT NOT NULL, state BLOB NOT NULL, beat INTEGER NOT NULL);
CREATE TABLE views (term INTEGER PRIMARY KEY, fence INTEGER NOT NULL, members TEXT NOT NULL);
"""


class FencedError(Exception):
    """Another agent leads the run now: nothing this one writes counts any more."""


class StoreGone(FencedError):
    """The run is over, and its store was removed."""


class StoreUnreachable(ConnectionError):
    """The store does not answer. What it was told to do may have been done, or may still be."""


class TermTaken(Exception):
    """The term has its view already: there are never two."""


@dataclass(frozen=True)
class Record:
    fence: int
    pid: int
    """The leader's process; 0: nobody leads."""
    address: str
    """Where other machines reach the leader."""
    state: bytes
    beat: int
    """Grows while the leader lives."""


class Store(ABC):
    """What every store can do. Open it in each process and thread that uses it; every call is one transaction."""

    run: str
    """The run's name in the store, for whoever opens it: its file, or its key."""

    @abstractmethod
    def read(self) -> Record:
        """As it is now, never as it was. StoreGone: the run is over."""

    @abstractmethod
    def lead(self, after: int, pid: int, address: str = "") -> int:
        """Take over from the leader whose fence was `after`; the own fence. FencedError: another was faster."""

    @abstractmethod
    def beat(self, fence: int) -> None:
        """A sign of the leader's life, for those who cannot see its process."""

    @abstractmethod
    def write(self, fence: int, state: bytes, views: Sequence[View] = ()) -> None:
        """What the leader has decided, before anybody is told: its state and its new views. It is a beat too."""

    @abstractmethod
    def views(self) -> list[View]: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def remove(self, fence: int) -> None:
        """By the leader, at the run's end: whoever comes later finds that it is over."""


def create_store(address: str, run: str) -> Store:
    """A new run's store: at `etcd://HOST:PORT,…` under a name made from `run`; with no address, the file `run`."""
    if not address:
        return LocalStore.create(Path(run))
    from paceline.cluster.etcd import EtcdStore

    return EtcdStore.create(address, run)


def open_store(address: str, run: str) -> Store:
    """One that is there already, under the name it was given (`Store.run`)."""
    if not address:
        return LocalStore(Path(run))
    from paceline.cluster.etcd import EtcdStore

    return EtcdStore(address, run)


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


class LocalStore(Store):
    """A small SQLite file. Its leader's life is seen otherwise (pidfd, board), so nobody needs to beat in here."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, str(path)
        kind = file_system(path)
        if kind.startswith(_SHARED):
            raise UsageError(
                f"{path} lies on a shared disk ({kind}), where locks do not hold: point XDG_RUNTIME_DIR to a local folder"
            )
        if not path.exists():
            raise StoreGone(f"{self.run} is gone: the run is over")
        # Nothing here outlives the machine, so nothing is synced; a killed process leaves whole transactions.
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=1.0, isolation_level=None, uri=True)
        self._db.execute("PRAGMA synchronous = OFF")

    @classmethod
    def create(cls, path: Path) -> LocalStore:
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        store = cls(path)
        store._db.executescript(f"BEGIN IMMEDIATE; {_TABLES} INSERT INTO run VALUES (1, 0, 0, '', x'', 0); COMMIT;")
        return store

    def read(self) -> Record:
        row = self._db.execute("SELECT fence, pid, address, state, beat FROM run").fetchone()
        if row is None:
            raise StoreGone(f"{self.run} is gone: the run is over")
        return Record(*row)

    def lead(self, after: int, pid: int, address: str = "") -> int:
        self._change(after, "fence = fence + 1, pid = ?, address = ?", (pid, address))
        return after + 1

    def beat(self, fence: int) -> None:
        self._change(fence, "beat = beat + 1")

    def write(self, fence: int, state: bytes, views: Sequence[View] = ()) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._change(fence, "state = ?, beat = beat + 1", (state,))
            for view in views:
                members = ",".join(map(str, view.members))
                self._db.execute("INSERT INTO views VALUES (?, ?, ?)", (view.term, fence, members))
            self._db.execute("COMMIT")
        except BaseException as error:
            self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError):
                raise TermTaken(f"of the terms {[view.term for view in views]} one has its view already") from None
            raise

    def views(self) -> list[View]:
        rows = self._db.execute("SELECT term, members FROM views ORDER BY term").fetchall()
        return [View(term, tuple(int(member) for member in members.split(",") if member)) for term, members in rows]

    def close(self) -> None:
        self._db.close()

    def remove(self, fence: int) -> None:
        """The row goes first: whoever has the file open sees that too."""
        if not self._db.execute("DELETE FROM run WHERE fence = ?", (fence,)).rowcount:
            self._raise_fenced(fence)
        self.close()
        for suffix in ("", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _change(self, fence: int, what: str, values: tuple[object, ...] = ()) -> None:
        if not self._db.execute(f"UPDATE run SET {what} WHERE fence = ?", (*values, fence)).rowcount:
            self._raise_fenced(fence)

    def _raise_fenced(self, fence: int) -> None:
        self.read()  # unless it is gone
        raise FencedError(f"another agent leads the run; fence {fence} is over")
