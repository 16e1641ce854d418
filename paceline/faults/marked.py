"""All processes that a run consists of, found by a mark in their environment.

Workers lead sessions of their own, and whoever started them may be dead: neither a process group nor
parents lead to them. What a process was started with stays readable in /proc.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "PACELINE_REHEARSAL"
_POLL_S = 0.05


def marked(mark: str) -> dict[int, str]:
    """Living processes with this mark, and their commands."""
    wanted, found = f"{VARIABLE}={mark}".encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = command.strip()
        except OSError:
            continue  # it has ended, or is another user's
    return found


def end_marked(mark: str, patience_s: float = 10.0) -> None:
    """SIGKILL to all, until none is left: one may have started another meanwhile."""
    deadline = time.monotonic() + patience_s
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_S)
