"""Real runs with fault plans, each in a process and a folder of its own: started, waited for, ended if they hang.

A run is over when no process of it is left, not when the one that was started has ended: that may be the
leading agent, and the run goes on without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.faults.judge import Outcome, Verdict, judge
from paceline.faults.marked import VARIABLE, end_marked, marked
from paceline.faults.plan import Fault
from paceline.faults.random import kills_everything
from paceline.folder import RunFolder

_POLL_S = 0.05
_GRACE_S = 5.0
"""After the end of the process that was started, its last helpers may take so long to go."""
_REFERENCE_LIMIT_S = 3600.0


def plan_flags(faults: Sequence[Fault], reference: Outcome) -> list[str]:
    """What a run needs besides its own flags to have these faults: and a checkpoint, where only that survives."""
    flags = [word for fault in faults for word in ("--fault", str(fault))]
    if any(map(kills_everything, faults)):
        flags += ["--checkpoint-every", str(max(1, reference.summary["steps"] // 10))]
    return flags


class Interrupted(Exception):
    """The rehearsal was told to stop; what it had started is ended."""


@dataclass
class Rehearsal:
    folder: Path
    """Where the runs' folders go."""
    flags: Sequence[str]
    """For `paceline run`, in front of the target."""
    target: Sequence[str]
    """The script and its arguments."""
    verifies: bool = False
    """Whether `paceline verify` is there to compare the receipts."""
    patience_s: float = 60.0
    """How long a run may take beyond twenty times the reference."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set from outside: end everything, and raise Interrupted."""

    def reference(self) -> Outcome:
        """The run without a fault, to which all others are compared."""
        return self._run("reference", (), _REFERENCE_LIMIT_S)

    def rehearse(self, seed: int, faults: Sequence[Fault], reference: Outcome) -> Verdict:
        name = f"seed-{seed}"
        # A hang is a violation too; but what a plan itself holds up must not look like one.
        limit_s = self.patience_s + 20.0 * reference.seconds + sum(fault.for_s or 0.0 for fault in faults)
        outcome = self._run(name, plan_flags(faults, reference), limit_s)
        if any(map(kills_everything, faults)) and outcome.code and not outcome.late and not outcome.summary:
            resumed = self._finish(name, ["resume", str(self.folder / name)], limit_s)
            outcome = replace(resumed, seconds=outcome.seconds + resumed.seconds)
        if self.verifies and outcome.summary:
            outcome = replace(outcome, unlike=self._verified(name))
        return judge(reference.summary, outcome, seed, faults)

    def output(self, name: str) -> Path:
        """What the run printed."""
        return self.folder / f"{name}.out"

    def _run(self, name: str, plan: Sequence[str], limit_s: float) -> Outcome:
        where = ["--runs", str(self.folder), "--name", name]
        command = ["run", *where, *self.flags, *plan, *self.target]
        return self._finish(name, command, limit_s)

    def _finish(self, name: str, command: Sequence[str], limit_s: float) -> Outcome:
        """Start it, see it to its end, and look at what it left."""
        began, mark = time.monotonic(), f"{self.folder.name}/{name}"
        with open(self.output(name), "ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, VARIABLE: mark},
                start_new_session=True,  # a Ctrl-C is for us: we end the run, it does not stop by itself
            )
        try:
            late = not self._wait(lambda: process.poll() is not None, limit_s)
            if not late:
                self._wait(lambda: not marked(mark), _GRACE_S)
            left = [] if late else [f"{pid} {words}" for pid, words in marked(mark).items()]
        finally:
            end_marked(mark)
            process.wait()
        return self._outcome(name, process.returncode, time.monotonic() - began, late, left)

    def _wait(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Until it is over, for so long at most; whether it is."""
        deadline = time.monotonic() + limit_s
        while not over():
            if time.monotonic() > deadline:
                return False
            if self.stop.wait(_POLL_S):
                raise Interrupted
        return True

    def _outcome(self, name: str, code: int, seconds: float, late: bool, left: Sequence[str]) -> Outcome:
        run = RunFolder(self.folder / name)
        printed = self.output(name).read_text(errors="replace").splitlines()
        return Outcome(
            code,
            run.read_json(run.summary),
            seconds,
            [event["why"] for event in run.read_lines(run.events) if event["event"] == "fault"],
            [metric["time"] for metric in run.read_lines(run.metrics)],
            late,
            left,
            next((line.strip() for line in reversed(printed) if line.strip()), ""),
        )

    def unproven(self) -> str:
        """What of the reference `paceline verify` does not prove, if anything: a script may leave its loops."""
        return _first_of(self._said_by_verify("reference"))

    def _verified(self, name: str) -> str:
        """What `paceline verify` has to say against this run; or nothing. What it says against the reference too is no fault's doing."""
        said = self._said_by_verify("reference", name)
        known = {line.removeprefix("reference: ") for line in said if line.startswith("reference: ")}
        return _first_of([line for line in said if line.partition(": ")[2] not in known])

    def _said_by_verify(self, *names: str) -> list[str]:
        command = [sys.executable, "-P", "-m", "paceline", "verify", *(str(self.folder / name) for name in names)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if not done.returncode:
            return []
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return [line.removeprefix("paceline: ") for line in said] or [f"exit code {done.returncode}"]


def _first_of(said: Sequence[str]) -> str:
    return said[0] + (f" (and {len(said) - 1} more)" if said[1:] else "") if said else ""
