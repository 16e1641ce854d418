"""What this process holds that a test may leave behind: children, sockets, memfds, threads, files in memory.

`Held.now()` takes a picture; `leaked(before)` says in words what is there now and was not before, after
giving what is on its way out a moment to go. Several test processes may run side by side: each sees its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from paceline.cluster.store import runtime_folder

GRACE_S = 2.0
_POLL_S = 0.01
_SHM = Path("/dev/shm")
_OF_PROCESS = re.compile(r"(?:torch_|paceline-etcd-)(\d+)[_-]")


def children() -> dict[int, str]:
    """This process's children, zombies too, each with its command; Python's own resource tracker aside."""
    found: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            found[int(pid)] = _command(int(pid))
    found.pop(getattr(resource_tracker._resource_tracker, "_pid", None) or -1, None)
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return words.strip()[:120] or "a zombie: it has ended and nobody waited for it"
    except OSError:
        return "?"


def processes_of(folder: Path) -> list[int]:
    """Living processes with this folder in their command line: a run's agents, nursery, workers, terminal."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and bytes(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def end_processes_of(folder: Path, grace_s: float = 0.0) -> list[str]:
    """Kill what a test has left running; in words, who did not end by itself in time."""
    deadline = time.monotonic() + grace_s
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    words = [f"process {pid}: {_command(pid)}" for pid in processes_of(folder)]
    while left := processes_of(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    for known in folder.rglob("agent*.json"):
        Path(json.loads(known.read_text())["store"]).unlink(missing_ok=True)
    return words


def descriptors() -> Counter[str]:
    """Sockets and memfds this process has open, told apart by inode."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "/memfd:")):
                found[f"{target} (inode {os.stat(f'/proc/self/fd/{name}').st_ino})"] += 1
        except OSError:
            continue
    return found


def threads() -> dict[int, str]:
    """Threads that Python started; those it merely met (autograd's, say) are not ours to end."""
    dummy = threading._DummyThread
    return {id(t): t.name for t in threading.enumerate() if not isinstance(t, dummy)}


def shared_files() -> set[str]:
    """What lies in this test process's own runtime folder (the stores of its runs), and torch's files in /dev/shm,
    without those of living processes that are not our children, and without the empty one that a loader's process leaves
    which is killed in the moment between making and removing it: torch does both, and nobody else could."""
    ours = {os.getpid(), *children()}
    return {str(path) for path in _entries(runtime_folder()) if path.name.startswith("paceline")} | {
        str(path)
        for path in _entries(_SHM)
        if path.name.startswith("torch_") and not _is_anothers(path.name, ours) and _has_bytes(path)
    }


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:  # gone by now
        return False


def _is_anothers(name: str, ours: set[int]) -> bool:
    match = _OF_PROCESS.match(name)
    return bool(match) and int(match[1]) not in ours and Path(f"/proc/{match[1]}").exists()


@dataclass(frozen=True)
class Held:
    children: dict[int, str]
    descriptors: Counter[str]
    threads: dict[int, str]
    files: set[str]

    @staticmethod
    def now() -> Held:
        return Held(children(), descriptors(), threads(), shared_files())

    def beyond(self, before: Held) -> list[str]:
        """In words: what is here and was not there."""
        words = [f"process {p}: {c}" for p, c in self.children.items() if p not in before.children]
        words += [f"descriptor {name}" for name in self.descriptors - before.descriptors]
        words += [f"thread {name}" for key, name in self.threads.items() if key not in before.threads]
        words += [f"file {path}" for path in sorted(self.files - before.files)]
        return words


def leaked(before: Held, grace_s: float = GRACE_S) -> list[str]:
    """What stays although nothing refers to it any more and it had `grace_s` to go."""
    found = Held.now().beyond(before)
    if not found:
        return []
    gc.collect()
    deadline = time.monotonic() + grace_s
    while (found := Held.now().beyond(before)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
