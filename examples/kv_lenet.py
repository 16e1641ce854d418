"""LeNet on Fashion-MNIST by push and pull: the classic loop of parameter servers, written out with `run.kv`.

python examples/kv_lenet.py
paceline run -n 2 --servers 2 examples/kv_lenet.py --sync-every 2

The servers' part needs no script. They hold one tensor by name for each parameter, and do with every push what it says:
"assign" makes it, "sgd" takes so much of a gradient off. `paceline run --servers` starts them; alone, the one in this process
does it. The workers' part is below: each goes through its own part of the data at its own pace, and asks nobody else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fashion_data
from fashion_mnist import LeNet


def part_of(data: TensorDataset, batch_size: int, epoch: int, run: paceline.Run) -> Iterator[list[torch.Tensor]]:
    """This worker's batches: every n-th sample of an order that is the same on all."""
    images, labels = data.tensors
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    for chosen in order[run.rank :: run.workers].split(batch_size):
        yield [images[chosen].to(run.device), labels[chosen].to(run.device)]


def synchronize(run: paceline.Run, model: nn.Module, rate: float) -> None:
    """Push the gradients that have gathered, and pull the weights that came of it, with what other workers pushed."""
    run.kv.wait(
        *[
            run.kv.push_pull(name, parameter.grad, "sgd", into=parameter, rate=rate)
            for name, parameter in model.named_parameters()
        ]
    )
    model.zero_grad()


def pull(run: paceline.Run, model: nn.Module) -> None:
    run.kv.wait(*[run.kv.pull(name, into=parameter) for name, parameter in model.named_parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet on Fashion-MNIST, by push and pull")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of each worker's pushes")
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--sync-every", type=int, default=1, help="batches from one push to the next")
    parser.add_argument("--samples", type=int, default=60000, help="of the training set")
    args = parser.parse_args()

    run = paceline.init()
    train_set, test_set = fashion_data.load()
    train_set = TensorDataset(*(tensor[: args.samples] for tensor in train_set.tensors))
    test_loader = DataLoader(test_set, batch_size=500)
    model = LeNet().to(run.device)

    # One worker says what the weights are to begin with; behind the barrier all pull them.
    if run.is_main:
        for name, parameter in model.named_parameters():
            run.kv.push(name, parameter, "assign")
    run.kv.barrier()
    pull(run, model)

    def test(batch: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
        x, y = batch
        return {"correct": (model(x).argmax(1) == y).sum(), "count": len(y)}

    for epoch in range(args.epochs):
        start = time.monotonic()
        gathered = 0
        for x, y in part_of(train_set, args.batch_size, epoch, run):
            F.cross_entropy(model(x), y).backward()  # gradients add up
            gathered += 1
            if gathered == args.sync_every:
                synchronize(run, model, args.lr / gathered)
                gathered = 0
        if gathered:
            synchronize(run, model, args.lr / gathered)

        run.kv.barrier()
        pull(run, model)
        sums = run.evaluate(test, test_loader)
        accuracy = sums["correct"] / sums["count"]
        run.log(accuracy=accuracy)  # of the same weights: nobody pushes before all have come out of evaluate()
        if run.is_main:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}, {time.monotonic() - start:.1f} s", flush=True)
        run.kv.barrier()
        if run.stopped:  # by --target 'accuracy>=0.87', Ctrl-C, …: the same on all behind a barrier
            break


if __name__ == "__main__":
    main()
