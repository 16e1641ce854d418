"""The MLP 784-2048-2048-10 on Fashion-MNIST, evaluated before training and after each epoch: what `benchmarks.thin_link` launches.

thin_link_script.py BATCH EPOCHS RATE, where BATCH is a worker's, and RATE the learning rate that falls to 0.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from benchmarks.models import mlp
from examples import fashion_data


def main(batch: int, epochs: int, rate: float) -> None:
    run = paceline.init()
    model = nn.Sequential(nn.Flatten(), mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    train, test = fashion_data.load()
    loader = DataLoader(train, batch_size=batch * run.settings.slots, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    run.prepare(model, optimizer, scheduler, loader)

    def right(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
        x, y = batch
        return {"right": int((model(x).argmax(1) == y).sum()), "count": len(y)}

    def tell() -> None:
        sums = run.evaluate(right, DataLoader(test, batch_size=1000))
        run.log(accuracy=sums["right"] / sums["count"])

    tell()
    for _ in run.epochs(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        tell()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
