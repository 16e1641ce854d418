"""What `benchmarks.straggler` trains: a share's time is a sleep."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

STEPS, SHARE_S, HIDDEN = int(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3])
WARM_UP, BATCH = 10, 64

run = paceline.init(seed=3)
model = nn.Sequential(nn.Linear(32, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(7)
count = BATCH * STEPS
data = TensorDataset(torch.randn(count, 32, generator=generator), torch.randint(0, 10, (count,), generator=generator))
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
run.prepare(model, optimizer, loader)


begun = 0.0
for _epoch in run.epochs(1):
    for _batch in loader:
        if run.step >= WARM_UP and not begun:
            begun, first = time.perf_counter(), run.step
        for x, y in run.slots():
            time.sleep(SHARE_S)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_main:
    speed = BATCH * (run.step - first) / (time.perf_counter() - begun)
    (run.dir / "speed.txt").write_text(str(speed))
