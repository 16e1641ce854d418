"""What a bound for rows gains: python -m benchmarks.rows_behind [--pairs 6] [--most 2] [--workers 1] [--servers 1]

A sparse model (20 ids a sample of 400,000, dim 64, Adagrad; 2000 samples a step) trained with `ps` and with `ps+rows:s`, in
turns. Reported: the time of a step, of a read of rows in forward, and how many updates reads were behind. With one worker and
one server on two cores each has its own; with more processes than cores, what a server does beside a worker it takes from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.statistics import words

_SIDE = Path(__file__).with_name("rows_behind_side.py")


class Found(NamedTuple):
    step_s: float
    read_s: float
    staleness: dict[str, int]


def measure(strategy: str, options: argparse.Namespace) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-n", str(options.workers), "--servers", str(options.servers), "--strategy", strategy, "--name", "it"]
        command = [sys.executable, "-m", "paceline", "run", "--runs", folder, "--show", "none", *flags]
        subprocess.run([*command, str(_SIDE), str(options.steps)], check=True, stderr=subprocess.DEVNULL, timeout=170)
        run = Path(folder) / "it"
        summary = json.loads((run / "summary.json").read_text())
        return Found(summary["median_step_s"], float((run / "read.txt").read_text()), summary.get("staleness", {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--most", type=int, default=2, help="how many updates behind rows may be read")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    bounded, in_step = f"ps+rows:{options.most}", "ps"
    found: dict[str, list[Found]] = {bounded: [], in_step: []}
    for pair in range(options.pairs):
        for strategy in (bounded, in_step)[:: 1 if pair % 2 else -1]:
            found[strategy].append(measure(strategy, options))
    print(f"{options.workers} workers, {options.servers} servers, {options.steps} steps")
    print(words(f"{bounded} against {in_step}", *([each.step_s for each in found[k]] for k in (bounded, in_step))))
    reads = {k: statistics.median(each.read_s for each in some) * 1e3 for k, some in found.items()}
    print(f"a read in forward: {reads[bounded]:.1f} ms against {reads[in_step]:.1f} ms")
    print(f"reads by updates behind: {[each.staleness for each in found[bounded]]}")


if __name__ == "__main__":
    main()
