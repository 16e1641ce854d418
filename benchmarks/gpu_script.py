"""A small convolutional net with dropout and BatchNorm, for benchmarks/gpu_strategies.py: what it learns can be learnt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.use_deterministic_algorithms(True)
run = paceline.init(seed=0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.1), nn.Linear(120, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
draw = torch.Generator().manual_seed(1)
y = torch.randint(10, (2048,), generator=draw)
x = torch.randn(2048, 1, 28, 28, generator=draw) + 0.7 * torch.randn(10, 1, 28, 28, generator=draw)[y]
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True)
run.prepare(model, optimizer, loader)
for _epoch in run.epochs(2):
    for _batch in loader:
        for x_share, y_share in run.slots():
            F.cross_entropy(model(x_share), y_share).backward()
        optimizer.step()
        optimizer.zero_grad()
whole = DataLoader(TensorDataset(x, y), batch_size=256)
sums = run.evaluate(lambda b: {"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum"), "n": len(b[1])}, whole)
run.log(loss=sums["loss"] / sums["n"])
