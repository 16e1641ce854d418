"""LeNet on Fashion-MNIST.

python examples/fashion_mnist.py
paceline run -n 4 examples/fashion_mnist.py --epochs 8
paceline run -n 4 --target 'accuracy>=0.89' examples/fashion_mnist.py
"""

from __future__ import annotations

import argparse
import time

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fashion_data


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet on Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate")
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    args = parser.parse_args()

    run = paceline.init()
    train_set, test_set = fashion_data.load()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)

    model = LeNet().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    epochs = run.settings.epochs or args.epochs  # `paceline run --epochs` wins, and the schedule must know
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=epochs * len(train_loader))
    run.prepare(model, optimizer, scheduler, train_loader)

    def test(batch: list[torch.Tensor]) -> dict[str, torch.Tensor | int]:
        x, y = batch
        out = model(x)
        return {
            "loss": F.cross_entropy(out, y, reduction="sum"),
            "correct": (out.argmax(1) == y).sum(),
            "count": len(y),
        }

    for epoch in run.epochs(epochs):
        start = time.monotonic()
        for _ in train_loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        sums = run.evaluate(test, test_loader)
        loss, accuracy = sums["loss"] / sums["count"], sums["correct"] / sums["count"]
        run.log(loss=loss, accuracy=accuracy)
        if run.is_main:
            seconds = time.monotonic() - start
            print(f"epoch {epoch + 1}: test loss {loss:.4f}, test accuracy {accuracy:.4f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
