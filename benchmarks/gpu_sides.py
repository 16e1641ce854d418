"""The sides of the GPU benchmark: each builds what it trains, and gives back one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_cases import Case, loss_of

Step = Callable[[], torch.Tensor]
_BY_FLAG = "--by-flag" in sys.argv


def bare(case: Case) -> Step:
    model, loader = case.model(), case.loader()
    optimizer = case.optimizer(model)

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                x, y = (tensor.to(case.device, non_blocking=True) for tensor in batch)
                with torch.autocast(case.device, torch.bfloat16):
                    loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def bare_in_full(case: Case) -> Step:
    """The bare loop as a flag has it: autocast ends with the model, and the loss is computed in fp32."""
    model, loader = case.model(), case.loader()
    optimizer = case.optimizer(model)

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                x, y = (tensor.to(case.device, non_blocking=True) for tensor in batch)
                with torch.autocast(case.device, torch.bfloat16):
                    output = model(x)
                loss = loss_of(output.float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_paceline(case: Case) -> Step:
    import paceline

    # The bare script with its own autocast and three lines changed; or none of its own, and the flag.
    precision = "bf16" if _BY_FLAG else "fp32"
    run = paceline.init(seed=0, precision=precision, device=case.device, threads=torch.get_num_threads())
    model, loader = case.model(), case.loader()
    optimizer = case.optimizer(model)
    run.prepare(model, optimizer, loader)

    def loop() -> Iterator[torch.Tensor]:
        for _ in run.epochs(1 << 30):
            for _batch in loader:
                for x, y in run.slots():
                    with torch.autocast(case.device, torch.bfloat16, enabled=not _BY_FLAG):
                        loss = loss_of(model(x), y)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_accelerate(case: Case) -> Step:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision="bf16",
        cpu=case.device == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),  # as the other sides copy
    )
    model = case.model()
    model, optimizer, loader = accelerator.prepare(model, case.optimizer(model), case.loader())

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for x, y in loader:
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


def with_fabric(case: Case) -> Step:
    try:
        from lightning_fabric import Fabric
    except ImportError:
        from lightning.fabric import Fabric

    fabric = Fabric(accelerator=case.device, devices=1, precision="bf16-mixed")
    model = case.model()
    model, optimizer = fabric.setup(model, case.optimizer(model))
    loader = fabric.setup_dataloaders(case.loader())

    def loop() -> Iterator[torch.Tensor]:
        while True:
            for x, y in loader:
                loss = loss_of(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    return loop().__next__


SIDES = {"bare": bare, "paceline": with_paceline, "accelerate": with_accelerate, "fabric": with_fabric}
if _BY_FLAG:
    SIDES["bare-fp32"] = bare_in_full
