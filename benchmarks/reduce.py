"""Reducing 23 MB between workers of one machine, private copy included, against Gloo's all-reduce.

    python -m benchmarks.reduce [--workers 4] [--pairs 20]

Each side runs in processes of its own, as its users would start them, and they take turns. Measured
from gradients in place (Paceline's slab, Gloo's buffer) to the sum in private memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.statistics import median_ratio
from benchmarks.turns import Side, wait_for_turns

FLOATS = 5_800_000
ROUNDS = 5


def timed(barrier: Callable[[], None], fill: Callable[[], None], reduce: Callable[[], None]) -> float:
    """The median of a few reduces, each started together."""
    times = []
    for _ in range(ROUNDS):
        fill()
        barrier()
        start = time.perf_counter()
        reduce()
        times.append(time.perf_counter() - start)
    return sorted(times)[ROUNDS // 2]


def paceline_side(folder: str) -> None:
    from paceline.session import Session
    from paceline.tensors.group import gloo
    from paceline.tensors.layout import Layout
    from paceline.tensors.tree import Plan

    session = Session({})
    session.board.main_ready = True
    peers = session.peers()
    group = gloo(session._store(), peers.rank, peers.size)
    layout, plan = Layout.of([torch.empty(FLOATS)]), Plan.of(peers.size, peers.size)
    gradient, out = torch.full((FLOATS,), 1.0 + peers.rank), [torch.empty(0)]

    def fill() -> None:
        peers.open(plan, layout, 1)
        peers.parts()[0][0][:FLOATS] = gradient

    def reduce() -> None:
        peers.exchange(1, np.zeros(1, dtype=np.int64))
        out[:] = peers.total(0, 1.0)

    wait_for_turns(folder, "paceline", session.is_main, lambda: timed(lambda: group.barrier().wait(), fill, reduce))
    assert out[0][0] == out[0][FLOATS - 1] == peers.size * (peers.size + 1) / 2
    os._exit(0)


def gloo_side(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    gradient, buffer = torch.full((FLOATS,), 1.0 + rank), torch.empty(FLOATS)
    measure = lambda: timed(dist.barrier, lambda: buffer.copy_(gradient), lambda: dist.all_reduce(buffer))  # noqa: E731
    wait_for_turns(folder, "gloo", rank == 0, measure)
    assert buffer[0] == buffer[-1] == size * (size + 1) / 2
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        module = ["-m", "benchmarks.reduce", "--side"]
        flags = ["-n", str(options.workers), "--runs", str(folder / "runs"), "--show", "none"]
        sides = [
            Side("paceline", ["-m", "paceline", "run", *flags, *module, "paceline", temporary], folder),
            Side("gloo", ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.workers}",
                          *module, "gloo", temporary], folder),
        ]  # fmt: skip
        ours, theirs = Side.take_turns(sides, options.pairs)
    ratio, low, high = median_ratio(theirs, ours)
    print(
        f"{FLOATS * 4 / 1e6:.0f} MB between {options.workers} workers: {sorted(ours)[len(ours) // 2] * 1e3:.2f} ms against "
        f"Gloo's {sorted(theirs)[len(theirs) // 2] * 1e3:.2f} ms, {ratio:.1f}× faster [{low:.1f}, {high:.1f}]"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        {"paceline": paceline_side, "gloo": gloo_side}[sys.argv[2]](sys.argv[3])
    main()
