"""What Paceline adds to a step of one process, in microseconds: the same loop with and without it, and a model that costs nothing.

    python -m benchmarks.overhead [--pairs 40] [--steps 300] [--batch 1024] [--calls]

Both sides live in one process and take turns, as in `benchmarks.gpu`; the data set hands out one ready-made
batch whatever it is asked for, so that fetching costs the same on both. The figure is what is left between the
fastest bursts, and between the medians. `--calls` counts the calls of functions in a step instead, by the file
they are in: that depends on nothing but the code.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], torch.Tensor]


class Ready(Dataset):
    """As many samples as one likes; a batch of them is always the same one."""

    def __init__(self, count: int) -> None:
        self._count, self._batch = count, [torch.ones(1, 1), torch.ones(1, 1)]

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: list[int]) -> Any:
        return self._batch


def as_it_is(batch: Any) -> Any:
    return batch


def parts(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = nn.Linear(1, 1)
    data = Ready(options.steps * options.batch)
    loader = DataLoader(data, batch_size=options.batch, shuffle=True, drop_last=True, collate_fn=as_it_is)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def bare(options: argparse.Namespace) -> Step:
    model, optimizer, loader = parts(options)

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                x, y = (tensor.to("cpu", non_blocking=True) for tensor in batch)
                loss = (model(x) - y).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_paceline(options: argparse.Namespace) -> Step:
    import paceline

    run = paceline.init(seed=0, device="cpu", threads=1)
    model, optimizer, loader = parts(options)
    run.prepare(model, optimizer, loader)

    def loop() -> Iterator[torch.Tensor]:
        for _ in run.epochs(1 << 30):
            for _batch in loader:
                for x, y in run.slots():
                    loss = (model(x) - y).sum()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


SIDES = {"bare": bare, "paceline": with_paceline}


def burst(step: Step, steps: int) -> float:
    """Microseconds a step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps * 1e6


def measure(options: argparse.Namespace) -> None:
    built = {name: make(options) for name, make in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(options.pairs + 1):
        for name in list(SIDES)[:: 1 if turn % 2 else -1]:
            took = burst(built[name], options.steps)
            if turn:
                times[name].append(took)
    for name, values in times.items():
        print(f"{name:9} {min(values):7.1f} µs a step at best, {statistics.median(values):7.1f} median")
    best, median = (pick(times["paceline"]) - pick(times["bare"]) for pick in (min, statistics.median))
    print(
        f"added     {best:7.1f} µs a step at best, {median:7.1f} median; batch {options.batch}, {options.pairs} pairs"
    )


def calls(options: argparse.Namespace) -> None:
    """Calls a step, Python's and C's, by file and function."""
    for name, make in SIDES.items():
        step = make(options)
        for _ in range(3):
            step()
        counts: collections.Counter[str] = collections.Counter()

        def note(frame: Any, event: str, arg: Any, counts: collections.Counter[str] = counts) -> None:
            if event == "call":
                file = "/".join(frame.f_code.co_filename.split("/")[-2:])
                counts[f"{file}:{frame.f_code.co_qualname}"] += 1
            elif event == "c_call":
                counts["C"] += 1

        rounds = options.steps - 10
        sys.setprofile(note)
        for _ in range(rounds):
            step()
        sys.setprofile(None)
        total = sum(counts.values()) - counts["C"]
        print(f"{name}: {total / rounds:.1f} calls of Python functions a step, {counts['C'] / rounds:.1f} of C's")
        for where, count in counts.most_common():
            print(f"  {count / rounds:6.2f}  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300, help="of a burst")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_RUNS"] = folder
        (calls if options.calls else measure)(options)
        sys.stdout.flush()
        os._exit(0)  # the loops stand in the middle of an epoch: nothing to finish


if __name__ == "__main__":
    main()
