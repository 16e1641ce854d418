"""What a codec does to training: the MLP 784-2048-2048-10 on Fashion-MNIST, one line for one strategy.

    PYTHONPATH=. python benchmarks/coded_accuracy.py allreduce+int8 [EPOCHS [SAMPLES [SLOTS]]]

Alone, in one process: what comes out does not depend on the workers. SGD, momentum 0.9, rate 0.05 falling to 0 by a cosine,
batches of 256.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from benchmarks.models import mlp
from examples import fashion_data

strategy, epochs, samples, slots = (*sys.argv[1:], *["allreduce", "5", "60000", "2"][len(sys.argv) - 1 :])
run = paceline.init(strategy=strategy, slots=int(slots), seed=1)
train, test = fashion_data.load()
images, labels = (tensor[: int(samples)] for tensor in train.tensors)
torch.manual_seed(1)
model = nn.Sequential(nn.Flatten(), mlp()).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(images, labels), batch_size=256, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(epochs) * len(loader))
run.prepare(model, optimizer, scheduler, loader)
began = time.monotonic()
for _epoch in run.epochs(int(epochs)):
    for _batch in loader:
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
with torch.no_grad():
    x, y = (tensor.to(run.device) for tensor in test.tensors)
    right = int((model(x).argmax(1) == y).sum())
took = time.monotonic() - began
print(
    f"{strategy:24} {epochs} epochs of {samples}, {slots} slots: accuracy {right / len(y):.4f}, last loss {loss:.4f}, {took:.0f} s"
)
