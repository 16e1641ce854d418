"""The models and data that several benchmarks train: the same code under every side."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def images(count: int, flat: bool) -> TensorDataset:
    """Pictures of noise, the shape of Fashion-MNIST, the same on every side."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, 784) if flat else (count, 1, 28, 28)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(torch.randn(shape, generator=generator), labels)
