"""One side of benchmarks/recovery.py and goodput.py: train LeNet or the MLP, and note down every step.

    recovery_side.py paceline|torchrun|torchft lenet|mlp BATCH_PER_WORKER STEPS FOLDER CHECKPOINT_EVERY

Same model, data, optimizer, batch and threads on every side. The others' batches are cut straight from the
tensors by the step's number: faster than a loader, and a resumed run needs no place in one.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import images, lenet, mlp
from benchmarks.steplog import StepLog
from paceline.state.hash import weights_sha256


@dataclass
class Training:
    kind: str
    batch: int
    """Samples a worker."""
    steps: int
    folder: Path
    every: int
    """Steps between two checkpoints, for those who need them."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model: nn.Module = lenet() if self.kind == "lenet" else mlp()
        self.data: TensorDataset = images(4096, flat=self.kind == "mlp")
        self.log = StepLog(self.folder)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def batch_at(self, step: int, worker: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.batch * workers
        epoch, at = divmod(step, len(self.data) // size)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))
        mine = order[at * size + worker * self.batch :][: self.batch]
        x, y = self.data.tensors
        return x[mine], y[mine]

    def finish(self, model: nn.Module, samples: int) -> None:
        (self.folder / "finished").write_text(f"{weights_sha256(model.state_dict())} {samples}")


def by_paceline(training: Training) -> None:
    import paceline

    run = paceline.init(seed=0)
    model, optimizer = training.model, training.sgd(training.model)
    size = training.batch * run.settings.workers
    loader = DataLoader(training.data, batch_size=size, shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)
    for _epoch in run.epochs(1 << 30):
        for _batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            training.log.done(run.step)


def by_torchrun(training: Training) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    model, optimizer = training.model, training.sgd(training.model)
    kept, first = training.folder / "checkpoint.pt", 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = DistributedDataParallel(model)
    for step in range(first, training.steps):
        x, y = training.batch_at(step, rank, workers)
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        training.log.done(step)
        if rank == 0 and (step + 1) % training.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, kept.with_suffix(".tmp"))
            os.replace(kept.with_suffix(".tmp"), kept)
    if rank == 0:
        training.finish(model, training.steps * training.batch * workers)
    dist.destroy_process_group()


def by_torchft(training: Training) -> None:
    """As in torchft's own example of DDP; a replica is one process."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    replica, replicas = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, optimizer = training.model, training.sgd(training.model)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{replica}",
    )
    # All of the first ones begin together: who comes alone would train alone, and no two runs would be alike.
    (training.folder / f"began-{replica}").touch()
    while len(list(training.folder.glob("began-*"))) < replicas:
        time.sleep(0.05)
    parallel, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while (step := manager.current_step()) < training.steps:
        x, y = training.batch_at(step, replica, replicas)
        managed.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        managed.step()
        kept = manager.current_step() > step
        training.log.done(manager.current_step() - 1 if kept else step, kept)
    if replica == 0:
        training.finish(model, manager.batches_committed() * training.batch)
    manager.shutdown()


def main() -> None:
    side, kind, batch, steps, folder, every = sys.argv[1:7]
    training = Training(kind, int(batch), int(steps), Path(folder), int(every))
    {"paceline": by_paceline, "torchrun": by_torchrun, "torchft": by_torchft}[side](training)


if __name__ == "__main__":
    main()
