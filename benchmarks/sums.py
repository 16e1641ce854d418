"""The sum test: what `paceline rehearse` trains to see that every push counts once, whatever the strategy.

    paceline rehearse --plans 200 -n 4 --strategy async --servers 2 benchmarks/sums.py

Each sample has a random whole number, and a step subtracts it from every element of the weights: exact in float64, in any
order. So the weights of a run without faults are known, and any push that is lost, doubled or torn shows.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES = 400
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0

run = paceline.init(seed=0)
numbers = torch.randint(1, 1 << 20, (SAMPLES,), generator=torch.Generator().manual_seed(1)).double()


class Sum(nn.Module):
    """Several fragments, so that a push is torn over servers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(5000, dtype=torch.float64)) for _ in range(4))

    def forward(self, added: torch.Tensor) -> torch.Tensor:
        return sum((part * (k + 1)).sum() for k, part in enumerate(self.parts)) * added.sum()


model = Sum()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(numbers), batch_size=8, shuffle=True)
run.prepare(model, optimizer, loader, loss="sum")
for _epoch in run.epochs(EPOCHS):
    for _batch in loader:
        for (added,) in run.slots():
            time.sleep(PAUSE_S)
            model(added).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(done=run.step)
if not run.stopped:
    for k, part in enumerate(model.parts):
        expected = -(k + 1) * EPOCHS * numbers.sum()
        assert bool((part == expected).all()), f"part {k} is off by {(part - expected).unique().tolist()}"
