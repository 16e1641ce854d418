"""What `benchmarks.straggler --target 0.86` trains: LeNet on Fashion-MNIST, with a sleep in each share, until a test accuracy.

straggler_accuracy.py SHARE_MS TARGET RATE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import lenet
from examples import fashion_data

SHARE_S, TARGET, RATE = float(sys.argv[1]) / 1e3, float(sys.argv[2]), float(sys.argv[3])
EPOCHS, BATCH = 20, 256

run = paceline.init(seed=3)
train, test = fashion_data.load()
model = lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
loader, held_out = DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(test, batch_size=500)
run.prepare(model, optimizer, loader)


def right(batch: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
    x, y = batch
    return {"right": (model(x).argmax(1) == y).sum(), "count": len(y)}


begun = time.perf_counter()
for epoch in run.epochs(EPOCHS):
    for _batch in loader:
        for x, y in run.slots():
            time.sleep(SHARE_S)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sums = run.evaluate(right, held_out)
    accuracy = sums["right"] / sums["count"]
    if accuracy >= TARGET:
        run.stop(f"{accuracy:.4f} after {epoch + 1} epochs")
        break
if run.is_main:
    (run.dir / "reached.txt").write_text(f"{time.perf_counter() - begun} {epoch + 1} {accuracy}")
