"""Reducing 23 MB between workers of one machine, against Gloo's all-reduce.

    python -m benchmarks.reduce [--workers 4] [--pairs 20]

Each side runs in processes of its own, as its users would start them, and they take turns. Measured
from gradients in place (Paceline's slab, Gloo's buffer) to a sum that the script may change without any
other worker seeing it. Two kinds of script:

    reads     It reads its gradients and leaves them as they are, as an optimizer does. Paceline's workers
              then all read one sum, each through pages that would be copied if it wrote to them.
    changes   It multiplies them in place, as clipping does. Each worker then gets a copy of its own, and
              that is measured with the rest. Without this Paceline would pay at the script's writing, a
              page at a time.

What the script does to the gradients lies between the measurements, on both sides.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.statistics import median_ratio
from benchmarks.turns import Side, wait_for_turns

FLOATS = 5_800_000
ROUNDS = 5


SCRIPTS: dict[str, Callable[[torch.Tensor], object]] = {"reads": torch.sum, "changes": lambda sums: sums.mul_(0.5)}


def timed(
    barrier: Callable[[], None],
    fill: Callable[[], None],
    reduce: Callable[[], torch.Tensor],
    script: Callable[[torch.Tensor], object],
    want: float,
) -> float:
    """The median of a few reduces, each started together."""
    times = []
    for _ in range(ROUNDS):
        fill()
        barrier()
        start = time.perf_counter()
        sums = reduce()
        times.append(time.perf_counter() - start)
        assert sums.min() == sums.max() == want
        script(sums)
    return sorted(times)[ROUNDS // 2]


def paceline_side(kind: str, folder: str) -> None:
    from paceline.tensors.group import gloo
    from paceline.tensors.layout import Layout
    from paceline.tensors.tree import Plan
    from paceline.worker.grouping import meeting_store
    from paceline.worker.session import Session

    session = Session({})
    session.board.main_ready = True
    peers = session.peers()
    group = gloo(meeting_store(session, "benchmark")(), peers.rank, peers.size)
    layout, plan = Layout.of([torch.empty(FLOATS)]), Plan.of(peers.size, peers.size)
    gradient = torch.full((FLOATS,), 1.0 + peers.rank)

    def fill() -> None:
        peers.open(plan, layout, 1)
        peers.parts()[0][0][:FLOATS] = gradient

    def reduce() -> torch.Tensor:
        peers.exchange(1, np.zeros(1, dtype=np.int64))
        return peers.total(0, 1.0)[0][:FLOATS]

    def measure() -> float:
        return timed(lambda: group.barrier().wait(), fill, reduce, SCRIPTS[kind], total(peers.size))

    wait_for_turns(folder, f"paceline-{kind}", session.is_main, measure)
    os._exit(0)


def gloo_side(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    gradient, buffer = torch.full((FLOATS,), 1.0 + rank), torch.empty(FLOATS)

    def reduce() -> torch.Tensor:
        dist.all_reduce(buffer)
        return buffer

    def measure() -> float:
        return timed(dist.barrier, lambda: buffer.copy_(gradient), reduce, SCRIPTS[kind], total(size))

    wait_for_turns(folder, f"gloo-{kind}", rank == 0, measure)
    os._exit(0)


def total(size: int) -> float:
    return size * (size + 1) / 2


def compare(kind: str, workers: int, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        module = ["-m", "benchmarks.reduce", "--side"]
        flags = ["-n", str(workers), "--runs", str(folder / "runs"), "--show", "none"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        sides = [
            Side(f"paceline-{kind}", ["-m", "paceline", "run", *flags, *module, "paceline", kind, temporary], folder),
            Side(f"gloo-{kind}", [*torchrun, *module, "gloo", kind, temporary], folder),
        ]
        ours, theirs = Side.take_turns(sides, pairs)
    ratio, low, high = median_ratio(theirs, ours)
    print(
        f"{FLOATS * 4 / 1e6:.0f} MB between {workers} workers, the script {kind} its gradients: "
        f"{median(ours) * 1e3:.2f} ms against Gloo's {median(theirs) * 1e3:.2f} ms, "
        f"{ratio:.1f}× faster [{low:.1f}, {high:.1f}]",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    for kind in SCRIPTS:
        compare(kind, options.workers, options.pairs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        {"paceline": paceline_side, "gloo": gloo_side}[sys.argv[2]](*sys.argv[3:])
    main()
