"""The run of benchmarks/checkpoint.py. checkpoint_side.py BATCH WINDOW PAIRS RESULT, where RESULT gets [seconds a step of each window with
a checkpoint, of each without, how many checkpoints were there in time]."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline
from benchmarks.models import images, mlp
from paceline.state.checkpoint import listed

batch, window, pairs = map(int, sys.argv[1:4])
result = Path(sys.argv[4])
run = paceline.init(seed=0)
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
steps = 2 * window * (pairs + 2)  # a first pair warms up, and the last loop's end is not one of the windows
data = images(4096, flat=True)
order = torch.randint(len(data), (steps * batch,), generator=torch.Generator().manual_seed(0)).tolist()
loader = DataLoader(data, batch_size=batch, sampler=order)
run.prepare(model, optimizer, loader)

ends: list[tuple[float, float]] = []
there = 0


def between(step: int) -> None:
    """Behind the last step of a window: what is looked at here is in no window's time."""
    global there
    ended = time.perf_counter()
    if run.is_main and step % (2 * window) == window and ends[2:]:
        names = [found.step for found in listed(str(run._session.folder.checkpoints))]
        there += step - window in names
    ends.append((ended, time.perf_counter()))


for _ in run.epochs(1):
    for _batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (run.step + 1) % window == 0:
            between(run.step + 1)

if run.is_main:
    run._keeping.settle()
    for found in listed(str(run._session.folder.checkpoints)):
        found.check()
    took = [(after[0] - before[1]) / window for before, after in zip(ends, ends[1:], strict=False)]
    behind, apart = took[1::2], took[2::2]
    result.write_text(json.dumps([behind[1 : pairs + 1], apart[1 : pairs + 1], there]))
