"""What `benchmarks.delays` trains: LeNet on Fashion-MNIST, the rate falling to 0 by a cosine.

delays_script.py EPOCHS RATE BATCH [SAMPLES]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import lenet
from examples import fashion_data

EPOCHS, RATE, BATCH = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

run = paceline.init()
train, test = fashion_data.load()
if len(sys.argv) > 4:
    train = TensorDataset(*(tensor[: int(sys.argv[4])] for tensor in train.tensors))
model = lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
loader, held_out = DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(test, batch_size=500)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
run.prepare(model, optimizer, scheduler, loader)


def right(batch: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
    x, y = batch
    return {"right": (model(x).argmax(1) == y).sum(), "count": len(y)}


for _epoch in run.epochs(EPOCHS):
    for _batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    sums = run.evaluate(right, held_out)
    run.log(accuracy=sums["right"] / sums["count"])
