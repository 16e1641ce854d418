"""Killing: one worker at a moment of its script; or every process at once, at any moment or in a checkpoint's write."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.faults.marked import VARIABLE, end_marked, marked
from tests.end_to_end.launching import COMMAND, TIMEOUT_S, environment
from tests.forked import Popen

DYING = """
def at(moment):
    if f"{run._session.worker}:{run.step}:{moment}" in orders:
        os.kill(os.getpid(), 9)

def dies_inside(name):
    peers = run._stepper._peers
    plain = getattr(peers, name)
    def called(*arguments):
        at(name)
        return plain(*arguments)
    setattr(peers, name, called)
"""
"""Of a script whose orders are WORKER:STEP:MOMENT: that worker dies there, or inside a call of its group."""


class Doomed:
    """A run named `it`, started in a folder, whose processes will all be killed."""

    def __init__(self, folder: Path, script: Path, workers: int, flags: Sequence[str]) -> None:
        self._out = folder / "out"
        self._mark = f"doomed/{folder}"
        self.folder = folder / "runs" / "it"
        self._deadline = time.monotonic() + TIMEOUT_S
        command = [*COMMAND, "run", "--runs", "runs", "--name", "it", "-n", str(workers), *flags]
        with open(self._out, "wb") as out:
            self._command = Popen(
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


def unpublished(address: Path) -> bool:
    """Whether the newest checkpoint there is being written. One without its manifest behind it is being removed."""
    newest = max(address.glob("*step-*"), key=lambda found: found.name.lstrip("."), default=None)
    return newest is not None and not (newest / "manifest.json").exists()
