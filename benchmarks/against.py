"""Step time against an earlier commit: python -m benchmarks.against COMMIT [--pairs 20] [--only LeNet]

The commit is checked out in a temporary folder. Both run the benchmark's script of today, live at once and take
turns. Reported: median of the paired ratios and its 95 % bounds. Ends with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.statistics import median_ratio, words
from benchmarks.turns import HERE, Side

_LIMIT = 1.03
CASES = [  # name, model, batch per worker, workers, steps a burst
    ("LeNet, batch 128 per worker, 2 workers", "lenet", 128, 2, 15),
    ("MLP 784-2048-2048-10, batch 64 per worker, 2 workers", "mlp", 64, 2, 10),
    ("LeNet, batch 128, one process", "lenet", 128, 1, 30),
    ("MLP, batch 64, one process", "mlp", 64, 1, 15),
]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The package as it was, with the benchmarks of today beside it."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=HERE, check=True)
        try:
            shutil.copytree(HERE / "benchmarks", tree / "benchmarks", dirs_exist_ok=True)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)


def compare(
    tree: Path, model: str, batch: int, workers: int, steps: int, pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds a step, now and then, turn by turn."""
    with tempfile.TemporaryDirectory() as temporary:

        def side(name: str, where: Path) -> Side:
            flags = [
                "-n",
                str(workers),
                "--slots",
                str(workers),
                "--runs",
                f"{temporary}/runs-{name}",
                "--show",
                "none",
            ]
            target = ["-m", "benchmarks.step_side", name, model, str(batch), str(steps), temporary]
            return Side(name, ["-m", "paceline", "run", *flags, *target], Path(temporary), where)

        now, then = Side.take_turns([side("paceline-now", HERE), side("paceline-then", tree)], pairs)
    return now, then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="run the cases whose name has this in it")
    options = parser.parse_args()
    missed = False
    with checkout(options.commit) as tree:
        for name, model, batch, workers, steps in CASES:
            if options.only.casefold() in name.casefold():
                now, then = compare(tree, model, batch, workers, steps, options.pairs)
                print(words(f"{name}, now against {options.commit}", now, then, _LIMIT), flush=True)
                missed |= median_ratio(now, then)[2] > _LIMIT
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
