"""One side of plain DDP (Gloo): `python -m benchmarks.thin_link_ddp RANK HOST BATCH EPOCHS RATE [STEPS]`.

The same model, batches, optimizer and schedule as `thin_link_script`. Rank 0 prints JSON: after each epoch [steps, accuracy],
or, where it is to stop after so many steps, the seconds of each but the first, which builds the buckets.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.models import mlp
from examples import fashion_data

_WORKERS, _PORT = 2, 29500


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test, batch_size=1000))
    return right / len(test)


def main(rank: int, host: str, batch: int, epochs: int, rate: float, stop: int | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{_PORT}", rank=rank, world_size=_WORKERS)
    model = nn.Sequential(nn.Flatten(), mlp())
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    train, test = fashion_data.load()
    sampler: DistributedSampler[int] = DistributedSampler(train, _WORKERS, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    batches = (pair for epoch in range(epochs) for pair in shuffled(loader, sampler, epoch))
    dist.barrier()
    ends = [time.perf_counter()]
    for steps, (x, y) in enumerate(islice(batches, stop), start=1):
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        if stop is None and steps % len(loader) == 0 and rank == 0:
            print(json.dumps([steps, accuracy(model, test)]), flush=True)
    if stop is not None and rank == 0:
        print(json.dumps([round(b - a, 4) for a, b in pairwise(ends[1:])]))
    dist.barrier()


def shuffled(loader: DataLoader[Any], sampler: DistributedSampler[int], epoch: int) -> Iterator[Any]:
    sampler.set_epoch(epoch)
    yield from loader


if __name__ == "__main__":
    rank, host, batch, epochs, rate, *stop = sys.argv[1:]
    main(int(rank), host, int(batch), int(epochs), float(rate), int(stop[0]) if stop else None)
