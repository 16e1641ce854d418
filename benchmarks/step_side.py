"""One side of benchmarks/step.py: train in bursts, on command.

    step_side.py paceline|ddp|bare lenet|mlp BATCH_PER_WORKER STEPS FOLDER

Same model, data, loader, optimizer and threads on every side.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.models import images, lenet, mlp
from benchmarks.turns import wait_for_turns


def burst(steps: int, one_step: Callable[[], None]) -> float:
    """Seconds a step takes, over so many after three to settle."""
    for _ in range(3):
        one_step()
    start = time.perf_counter()
    for _ in range(steps):
        one_step()
    return (time.perf_counter() - start) / steps


def forever(loader: DataLoader) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from loader


def main() -> None:
    side, kind, per_worker, steps, folder = sys.argv[1:6]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = lenet() if kind == "lenet" else mlp()
    data = images(4096, flat=kind == "mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = int(per_worker)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    if side.startswith("paceline"):
        import paceline

        run = paceline.init(seed=0)
        loader = DataLoader(data, batch_size=batch * run.settings.workers, shuffle=True, drop_last=True)
        run.prepare(model, optimizer, loader)

        def loop() -> Iterator[None]:
            for _ in run.epochs(1 << 30):
                for _batch in loader:
                    for x, y in run.slots():
                        loss(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield

        it = loop()
        wait_for_turns(folder, side, run.is_main, lambda: burst(int(steps), lambda: next(it)))
        os._exit(0)
    if side.startswith("ddp"):
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data.distributed import DistributedSampler

        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, drop_last=True), drop_last=True)
        is_main = dist.get_rank() == 0
    else:
        loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
        is_main = True
    batches = forever(loader)

    def plain_step() -> None:
        x, y = next(batches)
        loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    wait_for_turns(folder, side, is_main, lambda: burst(int(steps), plain_step))
    os._exit(0)


if __name__ == "__main__":
    main()
