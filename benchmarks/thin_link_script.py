"""The MLP 784-2048-2048-10 on Fashion-MNIST, evaluated after each epoch: what `benchmarks.thin_link` launches."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_data

BATCH = 64
"""Of each worker."""


def main(workers: int, epochs: int) -> None:
    run = paceline.init()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    train, test = fashion_data.load()
    loader = DataLoader(train, batch_size=BATCH * workers, shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)

    def right(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
        x, y = batch
        with torch.no_grad():
            return {"right": int((model(x).argmax(1) == y).sum()), "count": len(y)}

    for _ in run.epochs(epochs):
        for _ in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        sums = run.evaluate(right, DataLoader(test, batch_size=1000))
        run.log(accuracy=sums["right"] / sums["count"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
