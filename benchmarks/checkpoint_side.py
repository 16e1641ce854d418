"""One side of benchmarks/checkpoint.py: train in turns, on command.

checkpoint_side.py writing|not-writing EVERY STEPS FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import images, mlp
from benchmarks.turns import wait_for_turns
from paceline.state.checkpoint import listed

side, every, steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
run = paceline.init(seed=0)
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
loader = DataLoader(images(4096, flat=True), batch_size=64 * run.settings.workers, shuffle=True, drop_last=True)
run.prepare(model, optimizer, loader)


def loop() -> Iterator[None]:
    for _ in run.epochs(1 << 30):
        for _batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


it = loop()


def turn() -> float:
    """Seconds a step took; afterwards, whether the checkpoints that were due are there."""
    start = time.perf_counter()
    for _ in range(steps):
        next(it)
    took = (time.perf_counter() - start) / steps
    if side == "writing" and run.is_main:
        run._keeping.settle()
        there = {checkpoint.check().step for checkpoint in listed(run._session.folder.checkpoints)}
        due = range(-(-(run.step - steps) // every) * every, run.step, every)
        with open(folder / "missed", "a") as file:
            file.writelines(f"{step}\n" for step in due if step and step not in there)
    return took


for _ in range(every // 2):  # so that a turn does not end with a checkpoint
    next(it)
wait_for_turns(folder, side, run.is_main, turn)
os._exit(0)
