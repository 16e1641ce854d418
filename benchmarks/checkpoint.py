"""What checkpoints cost: python -m benchmarks.checkpoint [--pairs 20] [--only one]

A run that writes checkpoints against one that does not: the MLP 784-2048-2048-10 (5.8 M parameters) with Adam,
70 MB a checkpoint. The two live at once and take turns, and each turn has its checkpoints well inside it.
Reported: median of the paired ratios of wall time, its 95 % bounds, and how many checkpoints were left out because
the one before was still being written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.statistics import words
from benchmarks.turns import Side, over_cases

CASES = [  # name, workers, every so many steps, steps a turn, limit
    ("one worker and a spare core, a checkpoint every 10 steps", 1, 10, 40, 1.01),
    ("two workers on two cores, a checkpoint every 100 steps", 2, 100, 100, 1.01),
]
_KEEP = 8


def compare(name: str, workers: int, every: int, steps: int, limit: float, pairs: int) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def side(kind: str, *flags: str) -> Side:
            run = ["-m", "paceline", "run", "-n", str(workers), "--slots", str(workers), "--show", "none", *flags]
            target = ["benchmarks/checkpoint_side.py", kind, str(every), str(steps), temporary]
            return Side(kind, [*run, "--runs", str(folder / "runs"), "--name", kind, *target], folder)

        writing = side("writing", "--checkpoint-every", str(every), "--keep", str(_KEEP))
        ours, theirs = Side.take_turns([writing, side("not-writing")], pairs)
        missed = (folder / "missed").read_text().split()
    due = (pairs + 1) * steps // every
    return f"{words(name, ours, theirs, limit)}; {due - len(missed)} of {due} checkpoints written"


def main() -> None:
    over_cases(__doc__, CASES, compare)


if __name__ == "__main__":
    main()
