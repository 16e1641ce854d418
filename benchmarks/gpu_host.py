"""Where a step's time goes on a GPU's host: LeNet, phase by phase, and with parts of Paceline left out.

    PYTHONPATH=.carry/site:. python -m benchmarks.gpu_host [--rounds 300] [--batch 1024] [--device cuda|cpu] [--threads N]

A step of each variant is followed by a step of the next one, in an order that is drawn anew each round: what else
the machine does meets all alike. There is one bare loop too many, on data of its own, which shows what no code explains.
The GPU is waited for between steps, outside the time that is taken. A variant leaves something out that a run cannot do
without: it shows what that costs, not what could be had.
"""

from __future__ import annotations

import argparse
import os
import random as rolled
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from benchmarks.gpu_cases import Rows, as_it_is, loss_of
from benchmarks.models import images, lenet
from benchmarks.statistics import median_difference

PHASES = ("fetch", "forward", "backward", "optimizer", "step")
Patch = tuple[Any, str, Any]


class Side:
    """A loop that stands still between two steps, and how long the phases of each have taken."""

    def __init__(self, options: argparse.Namespace, data: Rows) -> None:
        self.device = options.device
        torch.manual_seed(0)
        self.model = lenet().to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        pin = self.device == "cuda"
        self.loader = DataLoader(data, options.batch, shuffle=True, drop_last=True, pin_memory=pin, collate_fn=as_it_is)
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.mark()
        with torch.autocast(self.device, torch.bfloat16):
            loss = loss_of(self.model(x), y)
        self.mark()
        loss.backward()
        self.mark()
        return loss

    def over(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mark()


def bare(options: argparse.Namespace, data: Rows) -> Iterator[list[float]]:
    side = Side(options, data)
    side.mark()
    while True:
        for batch in side.loader:
            x, y = (tensor.to(side.device, non_blocking=True) for tensor in batch)
            side.train(x, y)
            side.over()
            yield side.marks
            side.marks = [time.perf_counter()]


def with_paceline(options: argparse.Namespace, data: Rows) -> Iterator[list[float]]:
    import paceline

    run = paceline.init(seed=0, device=options.device, threads=torch.get_num_threads())
    side = Side(options, data)
    run.prepare(side.model, side.optimizer, side.loader)
    side.mark()
    for _ in run.epochs(1 << 30):
        for _batch in side.loader:
            for x, y in run.slots():
                side.train(x, y)
            side.over()
            yield side.marks
            side.marks = [time.perf_counter()]


def nothing(*arguments: Any, **more: Any) -> None:
    return


def variants() -> dict[str, list[Patch]]:
    """What is put in the place of what, by the variant's name."""
    from paceline.data import copies, loader
    from paceline.loop import steps

    def pin_all(value: Any) -> Any:
        return pin_memory(value)

    unseeded = [(copies, "set_known_seed", nothing), (copies, "untouched", lambda: True)]
    return {
        "paceline": [],
        "all pinned": [(loader, "pinned", pin_all)],
        "no known seed": unseeded,
        "no seed": [*unseeded, (steps, "set_seed", nothing)],
    }


def timed(spent: dict[str, list[float]]) -> list[Patch]:
    """The parts of a step as they are, each with a clock around it."""
    from paceline.data import copies, loader, partition
    from paceline.loop import steps

    def clocked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **more)
            spent[name].append(time.perf_counter() - start)
            return result

        return run

    parts = {
        "ids": (partition.BatchShares, "ids"),
        "the data set's fetch": (copies.Seeded, "_plain"),
        "known seed": (copies, "set_known_seed"),
        "untouched": (copies, "untouched"),
        "share (all above)": (loader.MapFeed, "share"),
        "pin": (loader, "pinned"),
        "to the GPU": (steps, "place"),
        "begin": (steps.Stepper, "begin"),
        "of it the seed": (steps, "set_seed"),
        "end": (steps.Stepper, "end"),
    }
    return [(owner, name, clocked(words, getattr(owner, name))) for words, (owner, name) in parts.items()]


def patched(patches: list[Patch], step: Callable[[], list[float]]) -> list[float]:
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        return step()
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


def measure(options: argparse.Namespace) -> None:
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    count = options.batch * max(4, 59392 // options.batch)
    data, other = (Rows(*images(count, flat=False).tensors) for _ in range(2))
    ours = with_paceline(options, data).__next__
    spent: dict[str, list[float]] = defaultdict(list)
    sides: dict[str, Callable[[], list[float]]] = {
        "bare": bare(options, data).__next__,
        "bare, other data": bare(options, other).__next__,
    }
    for name, patches in {**variants(), "timed": timed(spent)}.items():
        sides[name] = lambda patches=patches: patched(patches, ours)
    for _ in range(20):
        for step in sides.values():
            step()
            wait()
    spent.clear()
    took: dict[str, list[list[float]]] = {name: [] for name in sides}
    dice, order = rolled.Random(1), list(sides)
    for _ in range(options.rounds):
        dice.shuffle(order)
        for name in order:
            marks = sides[name]()
            wait()
            took[name].append([*(b - a for a, b in zip(marks, marks[1:], strict=False)), marks[-1] - marks[0]])
    report(options, took, spent)


def report(options: argparse.Namespace, took: dict[str, list[list[float]]], spent: dict[str, list[float]]) -> None:
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, batch {options.batch}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, "
          f"{options.rounds} rounds; µs of the host a step, medians")  # fmt: skip
    print(f"{'':18}" + "".join(f"{phase:>11}" for phase in PHASES) + "   more than bare [95 %]")
    for name, rows in took.items():
        columns = [[row[k] * 1e6 for row in rows] for k in range(len(PHASES))]
        more, low, high = median_difference(columns[-1], [row[-1] * 1e6 for row in took["bare"]])
        print(f"{name:18}" + "".join(f"{statistics.median(column):11.1f}" for column in columns)
              + f"   {more:7.1f} [{low:.1f}, {high:.1f}]")  # fmt: skip
    for name, seconds in spent.items():
        print(f"  {name:24} {statistics.median(seconds) * 1e6:8.1f} µs, {len(seconds) / options.rounds:.1f} a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, default=0, help="of torch; its own number if 0")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_RUNS"] = folder
        measure(options)
        sys.stdout.flush()
        os._exit(0)  # the loops stand in the middle of an epoch: nothing to finish


if __name__ == "__main__":
    main()
