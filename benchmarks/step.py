"""Step time beside DDP and the bare loop: python -m benchmarks.step [--pairs 20] [--only lenet]

Two workers against DDP under torchrun (Gloo), one process against the bare loop; the sides take turns
within one run, so that the machine's moods hit both alike. Reported: median of the paired ratios and
its 95 % bounds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.statistics import words
from benchmarks.turns import Side, over_cases

CASES = [  # name, model, batch per worker, workers, steps a burst, limit
    ("LeNet, batch 128 per worker, 2 workers against DDP", "lenet", 128, 2, 15, 1.03),
    ("MLP 784-2048-2048-10, batch 64 per worker, 2 workers against DDP", "mlp", 64, 2, 10, 0.75),
    ("LeNet, batch 128, one process against the bare loop", "lenet", 128, 1, 30, 1.03),
    ("MLP, batch 64, one process against the bare loop", "mlp", 64, 1, 15, 1.03),
]


def compare(name: str, model: str, batch: int, workers: int, steps: int, limit: float, pairs: int) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def target(side: str) -> list[str]:
            return ["-m", "benchmarks.step_side", side, model, str(batch), str(steps), temporary]

        flags = ["-n", str(workers), "--slots", str(workers), "--runs", str(folder / "runs"), "--show", "none"]
        sides = [Side("paceline", ["-m", "paceline", "run", *flags, *target("paceline")], folder)]
        if workers > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
            sides.append(Side("ddp", [*torchrun, *target("ddp")], folder))
        else:
            sides.append(Side("bare", target("bare"), folder))
        ours, theirs = Side.take_turns(sides, pairs)
    return words(name, ours, theirs, limit)


def main() -> None:
    over_cases(__doc__, CASES, compare)


if __name__ == "__main__":
    main()
