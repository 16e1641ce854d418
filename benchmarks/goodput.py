"""Goodput under kills: python -m benchmarks.goodput [--minutes 3] [--every 15] [--workers 4] [--seed 0]

LeNet, without end. In the disturbed run a random worker gets SIGKILL every so many seconds, and Paceline starts
another one for it; the run before it and the one behind it are left alone, so that the machine's drift shows. All
three are watched for the same time from their first step. Goodput is the committed samples a second of the disturbed
run against the mean of the other two. Ends with 1 if it is under 0.90.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import steplog
from benchmarks.events import living
from benchmarks.turns import HERE, python_path
from paceline.faults.marked import VARIABLE, end_marked
from paceline.folder import RunFolder

_LIMIT = 0.90
_START_S, _STOP_S = 60.0, 30.0
_WARM_UP_S = 3.0


@dataclass(frozen=True)
class Watched:
    """What a run did in the time in which it was watched."""

    per_s: float
    """Samples of steps that were committed, each once."""
    median_s: float
    stalls: list[float]
    joined: int


class Endless:
    """A run of LeNet that goes on until it is stopped."""

    def __init__(self, folder: Path, workers: int, slots: int, batch: int) -> None:
        folder.mkdir()
        self.steps, self.run, self._mark = folder, RunFolder(folder / "run"), f"goodput/{folder}"
        flags = ["-n", str(workers), "--slots", str(slots), "--runs", str(folder), "--name", "run", "--show", "none"]
        side = ["benchmarks/recovery_side.py", "paceline", "lenet", str(batch), "0", str(folder), "0"]
        self._log = folder / "log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "run", *flags, "--device", "cpu", *side],
                cwd=HERE,
                env={**os.environ, "PYTHONPATH": python_path(HERE), VARIABLE: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for_steps(self) -> None:
        deadline = time.monotonic() + _START_S
        while not steplog.read(self.steps):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not begin:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        time.sleep(_WARM_UP_S)

    def stop(self) -> None:
        """After its step."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        finally:
            end_marked(self._mark)
            self._process.wait()


def watch(run: Endless, seconds: float, every: float | None, batch: int, dice: random.Random) -> Watched:
    """For so many seconds; with a kill in the middle of every so many, or none."""
    kills: list[float] = []
    try:
        run.wait_for_steps()
        began = time.monotonic()
        end, kill_at = began + seconds, began + (every / 2 if every else seconds)
        while every and kill_at < end:
            time.sleep(max(0.0, kill_at - time.monotonic()))
            os.kill(dice.choice(list(living(run.run).values())), signal.SIGKILL)
            kills.append(time.monotonic())
            kill_at += every
        time.sleep(max(0.0, end - time.monotonic()))
    finally:
        run.stop()
    log = [done for done in steplog.read(run.steps) if began <= done.at <= end]
    joined = sum(event["event"] == "joined" for event in run.run.read_lines(run.run.events))
    new = steplog.times(log)
    return Watched(len(new) * batch / seconds, statistics.median(steplog.gaps(log)), steplog.stalls(log, kills), joined)


def words(name: str, seen: Watched) -> str:
    found = f"{name}: {seen.per_s:,.0f} samples/s, {seen.median_s * 1e3:.2f} ms a step"
    if not seen.stalls:
        return found
    median, longest = statistics.median(seen.stalls), max(seen.stalls)
    return f"{found}; {len(seen.stalls)} kills, {seen.joined} replacements joined; stall median {median:.2f} s, longest {longest:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from kill to kill")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--batch", type=int, default=96, help="samples a worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    batch, seconds = options.batch * options.workers, options.minutes * 60
    print(
        f"LeNet, {options.workers} workers, {options.slots} slots, batch {batch}, {seconds:.0f} s each, a kill every "
        f"{options.every:g} s, seed {options.seed}",
        flush=True,
    )
    found: list[Watched] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, every in (("clean", None), ("disturbed", options.every), ("clean-again", None)):
            run = Endless(Path(temporary) / name, options.workers, options.slots, options.batch)
            found.append(watch(run, seconds, every, batch, random.Random(options.seed)))
            print(words(name, found[-1]), flush=True)
    before, disturbed, after = found
    goodput = disturbed.per_s / statistics.mean([before.per_s, after.per_s])
    holds = goodput >= _LIMIT
    print(
        f"goodput {goodput:.3f} (drift of the clean runs {after.per_s / before.per_s:.3f})  limit {_LIMIT}: "
        f"{'holds' if holds else 'MISSED'}"
    )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
