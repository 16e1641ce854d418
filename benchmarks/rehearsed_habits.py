"""A second script for `paceline rehearse`: what scripts do around their loops. It leaves some loops early, evaluates behind each, has a
schedule go by what comes of that, an average of the weights, and a plain value of its own: whoever comes back at another place in it
ends with other weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import paceline

run = paceline.init(seed=0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(600, 20, generator=generator), torch.randint(0, 5, (600,), generator=generator))
loader = DataLoader(data, batch_size=48, shuffle=True)
held_out = DataLoader(data, batch_size=100)
run.prepare(model, optimizer, schedule, loader)
run.register("average", average)
run.state.setdefault("left", 0)
for _epoch in run.epochs(40):
    loss = None
    for _batch in loader:
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        if run.step % 10 == 9:
            run.state["left"] += 1
            break
    found = run.evaluate(
        lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), "count": len(batch[1])},
        held_out,
    )
    assert found["count"] == len(data)
    schedule.step(found["loss"] / found["count"] + 0.001 * run.state["left"])
    run.log(held_out=found["loss"] / found["count"])
