"""Where checkpoints lie: a folder of this machine, or any address fsspec knows (s3://…, gs://…, memory://…).

A place holds folders of files. A folder is drafted where no reader looks, or, where nothing can be renamed,
without its manifest; publishing it is one rename, or the manifest's own write. No torch in here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from paceline.errors import UsageError

MANIFEST = "manifest.json"
_ASIDE, _REMOVED, _GONE = ".", ".removed", ".gone"
_BLOCK = 4096  # bytes: what goes past the page cache goes in whole blocks


class Draft(Protocol):
    """A folder that is being written. Nobody sees it until it is published."""

    def add(self, file: str, pieces: Iterable[memoryview]) -> None: ...
    def seal(self, manifest: bytes) -> None:
        """All is added: what publishing needs is got ready, so that little is left to do then."""

    def publish(self) -> None: ...
    def drop(self) -> None: ...


class Place(Protocol):
    address: str

    def names(self) -> list[str]: ...
    def open(self, name: str, file: str) -> BinaryIO: ...
    def size(self, name: str, file: str) -> int: ...
    def begin(self, name: str) -> Draft: ...
    def remove(self, name: str) -> None:
        """No reader finds it any more; what it took up may stay, for the next draft, until all is swept."""

    def sweep(self) -> None:
        """Remove what no draft has taken, and what writers that died have left behind."""


def place(address: str) -> Place:
    """The place of this address. fsspec is imported only where a scheme asks for it."""
    return _Remote(address) if "://" in address else _Local(Path(address))


class _Local:
    def __init__(self, folder: Path) -> None:
        self.address, self._folder = str(folder), folder

    def names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(entry for entry in os.listdir(self._folder) if not entry.startswith(_ASIDE))

    def open(self, name: str, file: str) -> BinaryIO:
        return open(self._folder / name / file, "rb")

    def size(self, name: str, file: str) -> int:
        return (self._folder / name / file).stat().st_size

    def begin(self, name: str) -> Draft:
        return _LocalDraft(self._folder, name)

    def remove(self, name: str) -> None:
        aside = self._folder / f"{_ASIDE}{name}{_REMOVED}"
        _discard(aside)
        os.rename(self._folder / name, aside)  # a reader finds all of it or nothing

    def sweep(self) -> None:
        for entry in os.listdir(self._folder):
            if entry.startswith(_ASIDE):
                _discard(self._folder / entry)


class _LocalDraft:
    """A new folder. Its shards are written over those of a checkpoint that was removed, if there is one: what lies on the disk
    already takes a third of the time (measured), and gives nothing back to be allotted again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._aside = folder / f"{_ASIDE}{name}.{os.getpid()}"
        _discard(self._aside)
        self._aside.mkdir(parents=True)
        self._added: set[str] = set()
        removed = sorted(path for path in folder.glob(f"{_ASIDE}*{_REMOVED}") if not path.is_symlink())
        if removed and is_fuse(os.stat(folder).st_dev, Path("/proc/self/mountinfo").read_text(errors="replace")):
            removed = []  # its readers on other machines are unknown to this one's kernel
        self._removed = removed[-1] if removed else None
        if removed:
            _sync(folder)  # no power cut brings its old name back to what it has in it then

    def add(self, file: str, pieces: Iterable[memoryview]) -> None:
        self._write(file, self._reused(file), pieces)

    def _write(self, file: str, fd: int | None, pieces: Iterable[memoryview]) -> None:
        path = self._aside / file
        if fd is None:
            _discard(path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._added.add(file)
        with open(fd, "wb", buffering=0) as target:
            for piece in pieces:
                whole = len(piece) - len(piece) % _BLOCK
                _write(fd, piece[_write_past_cache(fd, piece[:whole]) :])
            target.truncate()
            os.fdatasync(fd)  # its size too; not its times, for which a file that is written over would need a commit

    def _reused(self, file: str) -> int | None:
        """The removed checkpoint's file of this name, under ours, if nobody else has anything of it; whatever is odd is not taken."""
        if self._removed is None:
            return None
        there, here = self._removed / file, self._aside / file
        with suppress(OSError):
            found = os.lstat(there)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # somebody's copy of it, as by `cp --link`
                return None
            os.rename(there, here)
            fd = os.open(here, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if _is_open_here_alone(fd):
                return fd
            os.close(fd)
        return None

    def seal(self, manifest: bytes) -> None:
        self._write(MANIFEST, None, [memoryview(manifest)])
        _sync(self._aside)

    def publish(self) -> None:
        if self._added != set(os.listdir(self._aside)):
            raise OSError(errno.EIO, "somebody else has removed some of its files")
        if (self._folder / self._name).exists():  # a damaged one: the run went on from an older one
            _Local(self._folder).remove(self._name)
        os.rename(self._aside, self._folder / self._name)
        _sync(self._folder)

    def drop(self) -> None:
        _discard(self._aside)


def _discard(path: Path) -> None:
    """As far as that is possible: what stays is tried again by the next sweep. A folder is renamed first: if its writer, whom we
    took for dead, publishes it in this moment, one of us finds nothing."""
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        gone = path
        if not path.name.endswith(_GONE):
            gone = path.with_name(path.name + _GONE)
            shutil.rmtree(gone, ignore_errors=True)  # of one that died in the middle of that, and had this name
            os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def is_fuse(device: int, mounts: str) -> bool:
    """Whether the file system of this number is a process's, by the lines of mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    fields = (line.split() for line in mounts.splitlines())
    return any(each[2] == number and each[each.index("-") + 1].startswith("fuse") for each in fields)


def _is_open_here_alone(fd: int) -> bool:
    """Whether no other process reads or maps this file: the kernel gives a write lease on no other, and so does no file system
    that cannot tell. Who copies a checkpoint while it is removed gets it as it was."""
    try:
        fcntl.fcntl(
            fd, fcntl.F_SETSIG, signal.SIGURG
        )  # should it be opened in this very moment: that one ends no process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _write(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _write_past_cache(fd: int, piece: memoryview) -> int:
    """How much of it went straight to the disk, where memory and file system allow that.

    Nobody reads a checkpoint soon. The copy into the page cache takes seven times the CPU (measured), and takes it from
    the training.
    """
    flags, done = fcntl.fcntl(fd, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(piece):
            done += os.write(fd, piece[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:  # cannot, as on a tmpfs, or not from this memory
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _sync(folder: Path) -> None:
    """So that the names in a folder outlive a power cut too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Remote:
    """By fsspec. Object stores cannot rename: files are written where they stay, the manifest last."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        try:
            self.files, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise UsageError(f"--checkpoints {address}: {error}") from None

    def at(self, name: str, file: str = "") -> str:
        return "/".join(filter(None, (self._root.rstrip("/"), name, file)))

    def names(self) -> list[str]:
        self.files.invalidate_cache()
        try:
            found = self.files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in found)

    def open(self, name: str, file: str) -> BinaryIO:
        return cast(BinaryIO, self.files.open(self.at(name, file), "rb"))

    def size(self, name: str, file: str) -> int:
        return int(self.files.size(self.at(name, file)))

    def begin(self, name: str) -> Draft:
        if name in self.names():  # a damaged or an unfinished one: the run went on from an older one
            self.remove(name)
        return _RemoteDraft(self, name)

    def remove(self, name: str) -> None:
        if self.files.exists(self.at(name, MANIFEST)):  # first: without it there is no checkpoint
            self.files.rm(self.at(name, MANIFEST))
        if self.files.exists(self.at(name)):  # an object store forgets a folder with its last file
            self.files.rm(self.at(name), recursive=True)

    def sweep(self) -> None:
        """Nothing lies aside here: an unfinished one stands among the others, and goes with the old ones."""


class _RemoteDraft:
    def __init__(self, place: _Remote, name: str) -> None:
        self._place, self._name, self._manifest = place, name, b""
        place.files.makedirs(place.at(name), exist_ok=True)

    def add(self, file: str, pieces: Iterable[memoryview]) -> None:
        target: Any
        with self._place.files.open(self._place.at(self._name, file), "wb") as target:
            for piece in pieces:
                target.write(piece)

    def seal(self, manifest: bytes) -> None:
        self._manifest = manifest

    def publish(self) -> None:
        self._place.files.pipe_file(self._place.at(self._name, MANIFEST), self._manifest)

    def drop(self) -> None:
        self._place.remove(self._name)
