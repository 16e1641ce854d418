"""Killing every process of a run at once: at any moment, or in the middle of a checkpoint's write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.faults.marked import VARIABLE, end_marked, marked
from tests.end_to_end.launching import TIMEOUT_S, environment


class Doomed:
    """A run named `it`, started in a folder, whose processes will all be killed."""

    def __init__(self, folder: Path, script: Path, workers: int, flags: Sequence[str]) -> None:
        self._out = folder / "out"
        self._mark = f"doomed/{folder}"
        self.folder = folder / "runs" / "it"
        self._deadline = time.monotonic() + TIMEOUT_S
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--runs",
            "runs",
            "--name",
            "it",
            "-n",
            str(workers),
            *flags,
        ]
        with open(self._out, "wb") as out:
            self._command = subprocess.Popen(
                [*command, str(script)],
                cwd=folder,
                env=environment() | {VARIABLE: self._mark},
                stdout=out,
                stderr=out,
            )

    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, moment: Callable[[], bool]) -> None:
        while not moment():
            if self._command.poll() is not None or time.monotonic() > self._deadline:
                self._command.kill()
                self._command.wait()
                raise AssertionError(f"the run did not come to that moment:\n{self._out.read_text()}")
            time.sleep(0.001)

    def stop_main_when(self, inside: Callable[[], bool]) -> None:
        """Stop main at a moment for which this holds, however short it is: seen, stopped, and seen again."""
        while True:
            self.wait_for(inside)
            main = self._workers()[0]
            os.kill(main, signal.SIGSTOP)
            while _state(main) != "T":
                assert time.monotonic() < self._deadline
            if inside():
                return
            os.kill(main, signal.SIGCONT)

    def kill(self) -> None:
        """Agents, standby, nursery and command are stopped first, so that they can do nothing about the workers' end."""
        for pid in set(marked(self._mark)) - set(self._workers()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        end_marked(self._mark)
        self._command.wait()
        assert not marked(self._mark)

    def _workers(self) -> list[int]:
        events = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [event["pid"] for event in events if event["event"] == "worker started"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def unpublished(address: Path, names: str) -> bool:
    """Whether a checkpoint lies there that is being written: `.step-*` where it is renamed, else `step-*`."""
    return any(not (draft / "manifest.json").exists() for draft in address.glob(names))
