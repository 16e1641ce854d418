"""What delays cost, and what is done against them: python -m benchmarks.delays [--seeds 5] [--jobs 1] [--out FILE]

LeNet on Fashion-MNIST by `async` over 9 workers and 2 servers: between a worker's pull and its push come the pushes of the eight
others. Plain, damped by the delay and with its compensation (DC-ASGD), each seed once. One line a run: the accuracy at the end
and how far ahead micro-batches began; then each way against plain async, by the seeds' differences. Ends with 1 if one is worse
in the mean. `--jobs` runs at once: on two cores leave it at 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.tables import campaign, teller
from benchmarks.turns import HERE
from tests.end_to_end.launching import paceline

_SCRIPT = HERE / "benchmarks" / "delays_script.py"
PLAIN = "async"
KINDS = (PLAIN, "async+damp:0.5", "async+dc:0.04")


def trained(kind: str, seed: int, workers: int, rest: list[str], timeout: float) -> tuple[float, str]:
    """The accuracy, and what the run's summary says of staleness."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("-n", str(workers), "--slots", str(workers), "--servers", "2", "--seed", str(seed), "--strategy", kind)
        where = ("--runs", "runs", "--name", "it", "--show", "none")
        done = paceline("run", *where, *flags, str(_SCRIPT), *rest, cwd=Path(folder), timeout=timeout)
        if done.returncode:
            raise SystemExit(f"{kind}, seed {seed}: {done.stderr[-2000:]}")
        summary = json.loads((Path(folder) / "runs" / "it" / "summary.json").read_text())
    ahead = ", ".join(f"{steps}: {count}" for steps, count in summary["staleness"].items())
    return summary["metrics"]["accuracy"], f"steps ahead {ahead}; {summary['wall_s']:.0f} s"


def main() -> int:
    parser = campaign(__doc__, seeds=5)
    parser.add_argument("--workers", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    options = parser.parse_args()
    tell = teller(options.out)
    tell(
        f"{options.workers} workers, 2 servers, {options.epochs} epochs, rate {options.rate}, falling to 0 by a cosine"
    )
    seeds = range(options.first, options.first + options.seeds)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rest = [str(options.epochs), str(options.rate), str(64 * options.workers)]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            (seed, kind): pool.submit(trained, kind, seed, options.workers, rest, options.timeout)
            for seed in seeds
            for kind in KINDS
        }
        for (seed, kind), run in runs.items():
            accuracy, words = run.result()
            found[kind].append(accuracy)
            tell(f"{kind:16} seed {seed}: {accuracy:.4f}; {words}")
    worse = []
    for kind in KINDS[1:]:
        gains = [ours - plain for ours, plain in zip(found[kind], found[PLAIN], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        mean = statistics.mean(found[kind])
        tell(f"{kind}: {mean:.4f} in the mean, {statistics.mean(gains):+.4f} ± {error:.4f} against {PLAIN}")
        worse += [kind] if statistics.mean(gains) < 0 else []
    tell(f"{PLAIN}: {statistics.mean(found[PLAIN]):.4f} in the mean, {min(found[PLAIN]):.4f} at least")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
