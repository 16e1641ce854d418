"""LeNet on Fashion-MNIST, trained by clients that keep their data: 20 of them, each with a few labels mostly.

paceline run -n 2 --servers 2 --strategy federated:rounds=50,clients=20,sample=10,alpha=0.3 examples/federated.py
paceline run -n 2 --servers 2 --strategy federated:rounds=50,clients=20,alpha=0.3,drop=0.5,outer=adam,lr=0.01 examples/federated.py
"""

from __future__ import annotations

import argparse

import paceline
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fashion_data
from fashion_mnist import LeNet


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet on Fashion-MNIST, federated")
    parser.add_argument("--lr", type=float, default=0.05, help="of a client's own optimizer")
    parser.add_argument("--batch-size", type=int, default=64, help="of a client")
    args = parser.parse_args()

    run = paceline.init()
    train_set, test_set = fashion_data.load()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = LeNet().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    run.prepare(model, optimizer, train_loader)

    def test(batch: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
        x, y = batch
        return {"correct": (model(x).argmax(1) == y).sum(), "count": len(y)}

    for epoch in run.epochs(50):  # a round each
        for _ in train_loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        sums = run.evaluate(test, test_loader)
        run.log(accuracy=sums["correct"] / sums["count"])
        if run.is_main:
            print(f"round {epoch + 1}: test accuracy {run.metrics['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
