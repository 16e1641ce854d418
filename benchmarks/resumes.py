"""Everything killed at once, then resumed: python -m benchmarks.resumes [--seeds 20] [--counts 1,2,3,5]

Each seed is one run of `benchmarks/rehearsed.py` on a random number of workers, all of whose processes, the agent
too, get SIGKILL: with even seeds at a random step, with odd seeds inside a checkpoint's write. What is left is copied
and resumed at each worker count. Printed for each: where it was killed and whether the weights are those of a run that
nobody disturbed. Ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.turns import HERE
from paceline.state.checkpoint import listed
from tests.end_to_end.killing import Doomed, unpublished
from tests.end_to_end.launching import launch, paceline

_SCRIPT = HERE / "benchmarks" / "rehearsed.py"
_FLAGS = ("--slots", "8", "--epochs", "8", "--checkpoint-every", "3")
_STEPS = 8 * 21


def kill_all(folder: Path, dice: random.Random, inside: bool) -> str:
    """A run that is killed; where it was."""
    after = dice.randrange(4, _STEPS - 40)
    doomed = Doomed(folder, _SCRIPT, dice.choice([1, 2, 3]), _FLAGS)
    checkpoints = doomed.folder / "checkpoints"
    doomed.wait_for(lambda: doomed.steps() >= after and bool(listed(str(checkpoints))))
    if inside:
        doomed.stop_main_when(lambda: unpublished(checkpoints))
    doomed.kill()
    return f"at step {doomed.steps()}{' inside a write' if inside else ''}"


def resume(folder: Path, workers: int) -> str:
    """The final weights of what is left in this folder, resumed in a copy of it."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        job = Path(copy) / "runs" / "it" / "job.json"
        job.write_text(json.dumps(json.loads(job.read_text()) | {"directory": copy}))
        try:
            done = paceline("resume", "--runs", "runs", "it", "-n", str(workers), cwd=Path(copy))
        except subprocess.TimeoutExpired:
            return "did not end"
        summary = Path(copy) / "runs" / "it" / "summary.json"
        return str(json.loads(summary.read_text())["weights_sha256"]) if done.returncode == 0 else done.stderr[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--counts", default="1,2,3,5", help="worker counts to resume at")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        clean = launch(Path(temporary), _SCRIPT, "-n", "1", *_FLAGS[:4]).weights
        print(f"undisturbed: {clean[:16]}", flush=True)
        for seed in range(options.first, options.first + options.seeds):
            folder = Path(temporary) / str(seed)
            folder.mkdir()
            where = kill_all(folder, random.Random(seed), inside=bool(seed % 2))
            results = {count: resume(folder, int(count)) for count in options.counts.split(",")}
            words = [f"{count}: {'same' if got == clean else f'DIFFERS ({got})'}" for count, got in results.items()]
            wrong += any(got != clean for got in results.values())
            print(f"seed {seed:3}: killed {where}; resumed at {', '.join(words)}", flush=True)
            shutil.rmtree(folder)
    print(f"{options.seeds - wrong} of {options.seeds} seeds the same")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
