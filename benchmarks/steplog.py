"""When each step was done, and by which process: what disturbed runs are judged by, the same on every side.

The training script writes, one file a process; whoever watches reads. A step's number is any that is the same on
all workers and grows by one.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    at: float
    """On the machine's monotonic clock, which all its processes share."""
    pid: int
    step: int
    kept: bool
    """False: computed, and thrown away."""


class StepLog:
    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def done(self, step: int, kept: bool = True) -> None:
        os.write(self._fd, f"{time.monotonic():.6f} {step} {int(kept)}\n".encode())


def read(folder: Path) -> list[Done]:
    """Everything so far, in the order of time."""
    found = []
    for path in folder.glob("*.steps"):
        pid = int(path.stem)
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                at, step, kept = line.split()
                found.append(Done(float(at), pid, int(step), kept == "1"))
    return sorted(found)


def times(log: Iterable[Done]) -> list[float]:
    """When each step was done for the first time, by whoever was first."""
    first: dict[int, float] = {}
    for done in log:
        if done.kept:
            first.setdefault(done.step, done.at)
    return sorted(first.values())


def gaps(log: Sequence[Done]) -> list[float]:
    """From one new step to the next."""
    new = times(log)
    return [after - before for before, after in pairwise(new)]


def stalls(log: Sequence[Done], kills: Sequence[float]) -> list[float]:
    """For each kill the longest time without a new step, until the next one. What is trained again is not new."""
    new = times(log)
    found = []
    for kill, end in pairwise([*kills, float("inf")]):
        last_before = max((at for at in new if at <= kill), default=kill)
        window = [last_before, *(at for at in new if kill < at <= end)]
        found.append(max((after - before for before, after in pairwise(window)), default=float("nan")))
    return found


def lost(log: Iterable[Done], workers: int) -> int:
    """Steps that were computed once more, or in vain."""
    trained: dict[int, set[int]] = defaultdict(set)
    thrown: dict[int, int] = defaultdict(int)
    for done in log:
        if done.kept:
            trained[done.step].add(done.pid)
        else:
            thrown[done.pid] += 1
    # Each process does a step once: more processes than workers did it again after a restart.
    again = sum(-(-len(pids) // workers) - 1 for pids in trained.values())
    return again + max(thrown.values(), default=0)


def living(log: Iterable[Done], since: float = 0.0) -> list[int]:
    """Processes that have done a step since then and are there still."""
    return [pid for pid in sorted({done.pid for done in log if done.at > since}) if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"
