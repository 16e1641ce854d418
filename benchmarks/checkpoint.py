"""What checkpoints cost: python -m benchmarks.checkpoint [--pairs 200] [--only one]

The MLP 784-2048-2048-10 (5.8 M parameters) with Adam, 70 MB a checkpoint. One run writes a checkpoint every 20 steps; the 10
steps behind each, in which it is copied and written, are set against the 10 steps that follow, in which nothing of it is left:
the same process, within a second. What it added to these is set against as many steps as lie between two checkpoints.
Reported: median of the paired ratios of wall time, its 95 % bounds, and how many checkpoints are there of those that were due.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.statistics import words
from benchmarks.turns import HERE, over_cases, python_path

CASES = [  # name, workers, global batch, steps between two checkpoints, limit
    ("one worker and a spare core, batch 256, a checkpoint every 10 steps", 1, 256, 10, 1.01),
    ("one worker and a spare core, batch 128, a checkpoint every 10 steps", 1, 128, 10, 1.01),
    ("one worker and a spare core, batch 64, a checkpoint every 10 steps", 1, 64, 10, 1.01),
    ("two workers on two cores, batch 128, a checkpoint every 100 steps", 2, 128, 100, 1.01),
]
WINDOW = 10  # steps: many times what the writing takes


def compare(name: str, workers: int, batch: int, every: int, limit: float, pairs: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        flags = ["-n", str(workers), "--slots", str(workers), "--device", "cpu", "--show", "none", "--threads", "1"]
        writing = ["--checkpoint-every", str(2 * WINDOW), "--keep", "8", "--runs", folder, "--name", "it"]
        command = [sys.executable, "-m", "paceline", "run", *flags, *writing]
        done = subprocess.run(
            [*command, "benchmarks/checkpoint_side.py", str(batch), str(WINDOW), str(pairs), str(result)],
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": python_path(HERE)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        behind, apart, there = json.loads(result.read_text())
    added = [quiet + (took - quiet) * WINDOW / every for took, quiet in zip(behind, apart, strict=True)]
    return f"{words(name, added, apart, limit)}; {there} of {pairs} checkpoints written"


def main() -> None:
    over_cases(__doc__, CASES, compare, pairs=200)


if __name__ == "__main__":
    main()
