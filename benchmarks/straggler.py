"""Throughput beside a slow worker: python -m benchmarks.straggler [STRATEGY ...] [--rounds 7] [--target 0.86]

Four workers, one slot each; worker 2 takes four times as long over a share. A share's time is a sleep, so cores are not the
limit. Every strategy runs once a round, in an order that is drawn; the first is what the others are compared with. Reported:
samples a second, ratio to the first (median, least and most of the rounds), and whether the weights were the same.

With `--target` it is LeNet on Fashion-MNIST, and what is measured is the time to the first epoch's end with this test accuracy.
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

_SIDE, _ACCURACY = (Path(__file__).with_name(name) for name in ("straggler_side.py", "straggler_accuracy.py"))


def measure(strategy: str, options: argparse.Namespace) -> tuple[float, str]:
    """Samples a second behind the warm-up, and the hash of the weights; or seconds to the target, and how it was reached."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-n", str(options.workers), "--servers", str(options.servers), "--strategy", strategy, "--name", "it"]
        fault = [] if options.slow == 1 else ["--fault", f"slow worker:2 x{options.slow}"]
        script, arguments = _SIDE, [str(options.steps), str(options.share_ms), str(options.hidden)]
        if options.target:
            script, arguments = _ACCURACY, [str(options.share_ms), str(options.target), str(options.rate)]
        command = [sys.executable, "-m", "paceline", "run", "--runs", folder, "--show", "none", *flags, *fault]
        timeout = 900 if options.target else 170
        subprocess.run([*command, str(script), *arguments], check=True, stdout=subprocess.DEVNULL, timeout=timeout)
        run = Path(folder) / "it"
        if options.target:
            seconds, epochs, accuracy = (run / "reached.txt").read_text().split()
            return float(seconds), f"{float(accuracy):.4f} after {epochs} epochs"
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
    parser.add_argument("--target", type=float, default=0.0, help="a test accuracy; the time to it is measured")
    parser.add_argument("--rate", type=float, default=0.02, help="the learning rate, on the way to it")
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
        weights = ", ".join(sorted(hashes[strategy] if options.target else {each[:12] for each in hashes[strategy]}))
        unit, what = ("s", "reached") if options.target else ("samples/s", "weights")
        print(
            f"{strategy:12} {statistics.median(found):7.1f} {unit} [{min(found):.1f}, {max(found):.1f}], "
            f"ratio to {first} {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] over {len(found)} rounds, "
            f"{what} {weights}"
        )


if __name__ == "__main__":
    main()
