"""One side of DDP on a link: seconds of each step, printed by rank 0. `python -m benchmarks.thin_link_ddp RANK HOST STEPS`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH = 64


def main(rank: int, host: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:29500", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step in range(steps + 1):
        start = time.perf_counter()
        x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        if rank == 0 and step:  # the first one builds the buckets
            print(f"{time.perf_counter() - start:.3f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
