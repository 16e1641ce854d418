"""Throughput beside a slow worker: python -m benchmarks.straggler [STRATEGY ...] [--rounds 7]

Four workers, one slot each; worker 2 takes four times as long over a share. A share's time is a sleep, so cores are not the
limit. Every strategy runs once a round, in an order that is drawn; the first is what the others are compared with. Reported:
samples a second, ratio to the first (median, least and most of the rounds), and whether the weights were the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SIDE = Path(__file__).with_name("straggler_side.py")


def measure(strategy: str, options: argparse.Namespace) -> tuple[float, str]:
    """Samples a second behind the warm-up, and the hash of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-n", str(options.workers), "--servers", str(options.servers), "--strategy", strategy, "--name", "it"]
        fault = [] if options.slow == 1 else ["--fault", f"slow worker:2 x{options.slow}"]
        arguments = [str(options.steps), str(options.share_ms), str(options.hidden)]
        command = [sys.executable, "-m", "paceline", "run", "--runs", folder, "--show", "none", *flags, *fault]
        subprocess.run([*command, str(_SIDE), *arguments], check=True, stdout=subprocess.DEVNULL, timeout=170)
        run = Path(folder) / "it"
        summary = json.loads((run / "summary.json").read_text())
        return float((run / "speed.txt").read_text()), str(summary["weights_sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=["ps", "ps+backup:1"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--slow", type=int, default=4, help="how many times as long worker 2 takes")
    parser.add_argument("--share-ms", type=float, default=20.0)
    parser.add_argument(
        "--hidden", type=int, default=16, help="units: from 200 on the servers' work shows on two cores"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {strategy: [] for strategy in options.strategies}
    hashes: dict[str, set[str]] = {strategy: set() for strategy in options.strategies}
    dice = random.Random(options.seed)
    for _ in range(options.rounds):
        for strategy in dice.sample(options.strategies, len(options.strategies)):
            speed, weights = measure(strategy, options)
            speeds[strategy].append(speed)
            hashes[strategy].add(weights)
    first = options.strategies[0]
    for strategy, found in speeds.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(found, speeds[first], strict=True))
        weights = ", ".join(sorted(each[:12] for each in hashes[strategy]))
        print(
            f"{strategy:12} {statistics.median(found):7.1f} samples/s [{min(found):.1f}, {max(found):.1f}], "
            f"ratio to {first} {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] over {len(found)} rounds, "
            f"weights {weights}"
        )


if __name__ == "__main__":
    main()
