"""Row updates per second of a sparse table on one core, beside a dense index_add of the same bytes.

    python -m benchmarks.rows [--rows 1000000] [--batch 65536] [--dim 64] [--pairs 20]

A table with a million rows; each update touches a random batch of them, ids of 64 bits. The bound is a plain
`index_add_` of gradients of the same batch into a dense matrix, at row numbers that need no looking up, repeated
until it has moved the bytes that an update must: Adagrad reads and writes a value and a sum for each element and reads a
gradient, five words, where `index_add_` moves three. They take turns, in one process with one thread.

Also printed: reading rows, beginning new ones, coalescing, the longest update while the table grows, and memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.statistics import median_ratio
from paceline.servers.row_optimizers import SGD, Adagrad, Adam, Momentum, RowOptimizer
from paceline.servers.rows import Rows, coalesce

WORDS = {SGD: 3, Momentum: 5, Adagrad: 5, Adam: 7}


def took(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def grow(table: Rows, ids: np.ndarray, batch: int, optimizer: RowOptimizer) -> list[float]:
    """All rows begun, a batch at a time."""
    gradients = np.ones((batch, table.dim), dtype=np.float32)
    return [
        took(lambda at=at: table.update(ids[at : at + batch], gradients[: len(ids[at : at + batch])], optimizer, 0))  # type: ignore[misc]
        for at in range(0, len(ids), batch)
    ]


def compare(optimizer: RowOptimizer, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(-(1 << 63), 1 << 63, options.rows, dtype=np.int64))
    rng.shuffle(ids)
    table, count = Rows(options.dim, optimizer), options.batch
    begun = grow(table, ids, count, optimizer)
    dense = torch.zeros(len(ids), options.dim)
    gradients = rng.standard_normal((count, options.dim)).astype(np.float32)
    rounds = WORDS[type(optimizer)] / 3
    ours, bound, read = [], [], []
    for turn in range(options.pairs + 1):
        numbers = rng.permutation(len(ids))[:count]
        sides = [
            (ours, lambda n=numbers: table.update(ids[n], gradients, optimizer, 1)),
            (bound, lambda n=numbers: dense.index_add_(0, torch.from_numpy(n), torch.from_numpy(gradients))),
            (read, lambda n=numbers: table.gather(ids[n])),
        ]
        for times, action in sides if turn % 2 else sides[::-1]:
            seconds = took(action)
            if turn:
                times.append(seconds)
    bound = [seconds * rounds for seconds in bound]
    ratio, low, high = median_ratio(ours, bound)
    print(
        f"{type(optimizer).__name__}: {count / median(ours) / 1e6:.2f} M row updates/s "
        f"[{count / max(ours) / 1e6:.2f}, {count / min(ours) / 1e6:.2f}], a dense index_add of the same bytes "
        f"{count / median(bound) / 1e6:.2f} M/s: {ratio:.2f} times its time [{low:.2f}, {high:.2f}]; "
        f"reads {count / median(read) / 1e6:.2f} M/s; new rows {len(ids) / sum(begun) / 1e6:.2f} M/s, "
        f"longest update {max(begun) * 1e3:.0f} ms; memory {table.nbytes / table_floor(table, optimizer):.3f} of values and states",
        flush=True,
    )


def table_floor(table: Rows, optimizer: RowOptimizer) -> int:
    return len(table) * 4 * table.dim * (1 + len(optimizer.states))


def coalescing(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.2, options.batch) % 100_000_000
    gradients = rng.standard_normal((len(ids), options.dim)).astype(np.float32)
    times = [took(lambda: coalesce(ids, gradients)) for _ in range(options.pairs)]
    print(f"coalesce: {len(ids) / median(times) / 1e6:.2f} M rows/s into {len(np.unique(ids))} of {len(ids)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for optimizer in (SGD(lr=0.1), Momentum(lr=0.1, momentum=0.9), Adagrad(lr=0.1), Adam(lr=0.1)):
        compare(optimizer, options)
    coalescing(options)


if __name__ == "__main__":
    main()
