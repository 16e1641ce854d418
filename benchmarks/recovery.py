"""kill -9 of a worker, beside torchrun and torchft: python -m benchmarks.recovery [--kills 3] [--rounds 1] [--seed 0]

Each side trains the same model on the same batches in as many processes (CPU, Gloo), once undisturbed and
once with random workers killed, each when all train again. Printed for each side: the median undisturbed step; the
stall of each kill (the longest time without a step that had not been done before); the steps lost (computed again, or
thrown away); how many of the samples are in the final weights; and whether these are the weights of the undisturbed run.

torchrun starts all workers anew, and the script goes on from its last checkpoint. torchft's replicas are one process
each, started again at once (`replicas.py`); it needs `pip install torchft-nightly`, here or where --torchft-python is.
A side that is missing is reported as that.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import steplog
from benchmarks.turns import HERE, python_path
from paceline.faults.marked import VARIABLE, end_marked
from paceline.folder import RunFolder

_LOOK_S = 0.2
_LIMIT_S = 900.0
_BETWEEN = (30, 60)
"""Steps from the moment at which all train again to the next kill."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONPATH": python_path(HERE),
    # Without it torchrun's restarted workers find the addresses of the dead ones in the store they share, and fail
    # (pytorch/pytorch#135712; seen here with torch 2.13 and Gloo).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True)
class Trained:
    """How one run went."""

    median_s: float
    stalls: list[float]
    lost: int
    weights: str
    samples: int
    took_s: float


@dataclass
class Side:
    name: str
    command: list[str]
    """Ends when the run does. FOLDER stands for the place of the run's files."""
    missing: str = ""
    """Why it cannot run here."""
    clean: list[Trained] = field(default_factory=list)
    disturbed: list[Trained] = field(default_factory=list)


class SideFailed(Exception):
    """The run did not come to its end."""


class Killer:
    """Kills a random worker whenever all train and a few steps have gone by."""

    def __init__(self, folder: Path, workers: int, kills: int, dice: random.Random) -> None:
        self._folder, self._workers, self._left, self._dice = folder, workers, kills, dice
        self._from: int | None = None
        """The step from which the next one may be killed."""
        self.times: list[float] = []

    def look(self) -> None:
        if not self._left:
            return
        log = steplog.read(self._folder)
        newest = max((done.step for done in log), default=0)
        pids = steplog.living(log, since=self.times[-1] if self.times else 0.0)
        if len(pids) < self._workers:
            self._from = None
        elif self._from is None:
            self._from = newest + self._dice.randint(*_BETWEEN)
        elif newest >= self._from:
            os.kill(self._dice.choice(pids), signal.SIGKILL)
            self.times.append(time.monotonic())
            self._left, self._from = self._left - 1, None


def train(side: Side, folder: Path, workers: int, kills: int, dice: random.Random) -> Trained:
    """One run to its end."""
    folder.mkdir()
    mark, began = f"recovery/{folder}", time.monotonic()
    env = {**os.environ, **_ENVIRONMENT, VARIABLE: mark}
    killer = Killer(folder, workers, kills, dice)
    with open(folder / "log", "wb") as log:
        command = [word.replace("FOLDER", str(folder)) for word in side.command]
        process = subprocess.Popen(command, cwd=HERE, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while process.poll() is None and time.monotonic() - began < _LIMIT_S:
            killer.look()
            time.sleep(_LOOK_S)
    finally:
        end_marked(mark)
        process.wait()
    if process.returncode != 0:
        last = (folder / "log").read_text(errors="replace").strip()[-500:]
        raise SideFailed(f"it ended with exit code {process.returncode}: {last}")
    if len(killer.times) < kills:
        raise SideFailed(f"the run was over after {len(killer.times)} of {kills} kills: give it more --steps")
    done = steplog.read(folder)
    weights, samples = _result(folder)
    stalls, median_s = steplog.stalls(done, killer.times), statistics.median(steplog.gaps(done))
    return Trained(median_s, stalls, steplog.lost(done, workers), weights, samples, time.monotonic() - began)


def _result(folder: Path) -> tuple[str, int]:
    """The hash of the final weights, and the samples that are in them."""
    if (folder / "finished").exists():
        weights, samples = (folder / "finished").read_text().split()
        return weights, int(samples)
    run = RunFolder(folder / "run")
    summary = run.read_json(run.summary)
    return summary["weights_sha256"], summary["samples"]


def sides(options: argparse.Namespace) -> list[Side]:
    n = str(options.workers)
    script = "benchmarks/recovery_side.py"
    words = [options.model, str(options.batch), str(options.steps), "FOLDER", str(options.checkpoint_every)]
    flags = ["--runs", "FOLDER", "--name", "run", "--show", "none", "--device", "cpu", "--steps", str(options.steps)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    torchrun.append(f"--max-restarts={options.kills}")
    replicas = ["-m", "benchmarks.replicas", n, str(options.heartbeat_ms)]
    return [
        Side("paceline", [sys.executable, "-m", "paceline", "run", "-n", n, *flags, script, "paceline", *words]),
        Side("torchrun", [sys.executable, *torchrun, script, "torchrun", *words]),
        Side(
            "torchft",
            [options.torchft_python, *replicas, script, "torchft", *words],
            missing=_missing(options.torchft_python, "import torchft"),
        ),
    ]


def _missing(python: str, statement: str) -> str:
    """Why it cannot be imported there; nothing, if it can."""
    done = subprocess.run([python, "-c", statement], cwd=HERE, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def words_of(side: Side, samples: int) -> str:
    if not side.disturbed:
        return f"{side.name}: missing: {side.missing}"
    step = statistics.median(run.median_s for run in side.clean)
    stalls = [stall for run in side.disturbed for stall in run.stalls]
    each = ", ".join(f"{stall:.2f}" for stall in stalls)
    lost = sum(run.lost for run in side.disturbed)
    repeats = len({run.weights for run in side.clean}) == 1
    equal = all(run.weights == side.clean[0].weights for run in side.disturbed)
    verdict = "as undisturbed" if equal else "NOT as undisturbed"
    verdict += "" if repeats else " (undisturbed runs differ from each other too)"
    return (
        f"{side.name}: {step * 1e3:.2f} ms a step; {len(stalls)} kills: stall median {statistics.median(stalls):.2f} s, "
        f"longest {max(stalls):.2f} s ({each}); {lost} steps lost; "
        f"{min(run.samples for run in side.disturbed)} of {samples} samples in the weights, which are {verdict}"
    )


def measure(all_sides: Sequence[Side], options: argparse.Namespace, folder: Path) -> None:
    """The sides take turns; the order rotates."""
    for number in range(options.rounds):
        at = number % len(all_sides)
        for side in [*all_sides[at:], *all_sides[:at]]:
            if side.missing:
                continue
            dice = random.Random(f"{options.seed}-{number}")
            try:
                side.clean.append(train(side, folder / f"{side.name}-{number}-clean", options.workers, 0, dice))
                killed = folder / f"{side.name}-{number}-killed"
                side.disturbed.append(train(side, killed, options.workers, options.kills, dice))
            except SideFailed as error:
                side.missing = str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--batch", type=int, default=32, help="samples a worker")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between torchrun's checkpoints")
    parser.add_argument("--heartbeat-ms", type=int, default=5000, help="after which torchft gives up a silent replica")
    parser.add_argument("--torchft-python", default=sys.executable, help="a Python that has torchft")
    parser.add_argument("--only", default="", help="run the sides whose name has this in it")
    options = parser.parse_args()
    chosen = [side for side in sides(options) if options.only in side.name]
    print(
        f"{options.model}, {options.workers} workers, batch {options.batch} each, {options.steps} steps, seed {options.seed}; "
        f"torchrun writes a checkpoint every {options.checkpoint_every} steps; torchft gives up a silent replica after "
        f"{options.heartbeat_ms} ms",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        measure(chosen, options, Path(temporary))
    for side in chosen:
        print(words_of(side, options.steps * options.batch * options.workers))


if __name__ == "__main__":
    main()
