"""What `benchmarks.rows_behind` trains."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

STEPS, BATCH, IDS, EACH, DIM, WARM_UP = int(sys.argv[1]), 2000, 400_000, 20, 64, 5

run = paceline.init(seed=3)
reads: list[float] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = paceline.SparseEmbedding(DIM, optimizer="adagrad")
        self.top = nn.Sequential(nn.Linear(EACH * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        rows = self.rows(ids)
        reads.append(time.perf_counter() - begun)
        return self.top(rows.flatten(1))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ids = torch.randint(0, IDS, (BATCH * STEPS, EACH), generator=torch.Generator().manual_seed(7))
loader = DataLoader(TensorDataset(ids), batch_size=BATCH)
run.prepare(model, optimizer, loader)
for _epoch in run.epochs(1):
    for _batch in loader:
        for (mine,) in run.slots():
            model(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_main:
    (run.dir / "read.txt").write_text(str(float(torch.tensor(reads[WARM_UP:]).median())))
