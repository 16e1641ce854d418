"""What a codec does to training: the MLP 784-2048-2048-10 on Fashion-MNIST; the accuracy of each epoch, in one line at the end.

    PYTHONPATH=. paceline run -n 2 --slots 2 --strategy allreduce+int8 benchmarks/coded_accuracy.py [EPOCHS [RATE]]

What comes out does not depend on the workers. SGD, momentum 0.9, a rate (0.05) that falls to 0 by a cosine, batches of 256.
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

epochs, rate = (*sys.argv[1:], *["5", "0.05"][len(sys.argv) - 1 :])
run = paceline.init()
train, test = fashion_data.load()
model = nn.Sequential(nn.Flatten(), mlp()).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=float(rate), momentum=0.9)
loader = DataLoader(train, batch_size=256, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(epochs) * len(loader))
run.prepare(model, optimizer, scheduler, loader)
run.state.setdefault("curve", [])


def right(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    x, y = batch
    return {"right": int((model(x).argmax(1) == y).sum()), "count": len(y)}


for _epoch in run.epochs(int(epochs)):
    for _batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    sums = run.evaluate(right, DataLoader(test, batch_size=1000))
    run.state["curve"].append(sums["right"] / sums["count"])
    run.log(accuracy=run.state["curve"][-1])
curve = " ".join(f"{accuracy:.4f}" for accuracy in run.state["curve"])
slots, seed = run.settings.slots, run.settings.seed
if run.is_main:
    print(f"{run.settings.strategy:24} {epochs} epochs, rate {rate}, {slots} slots, seed {seed}: accuracy {curve}")
