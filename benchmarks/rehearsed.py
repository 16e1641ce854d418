"""What `make rehearse` trains: small, but with everything that could lose its place. [sgd]: with momentum, for AdamW."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

run = paceline.init(seed=0)
model = nn.Sequential(
    nn.Linear(20, 300),
    nn.BatchNorm1d(300),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(300, 300),
    nn.ReLU(),
    nn.Linear(300, 5),
)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if sys.argv[1:] == ["sgd"]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 840)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(1000, 20, generator=generator), torch.randint(0, 5, (1000,), generator=generator))
loader = DataLoader(data, batch_size=48, shuffle=True)
run.prepare(model, optimizer, scheduler, loader)
for _epoch in run.epochs(40):
    for _batch in loader:
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(lr=scheduler.get_last_lr()[0])
    seen = run.evaluate(lambda batch: {"count": len(batch[1])}, DataLoader(data, batch_size=100))
    assert seen["count"] == len(data)
