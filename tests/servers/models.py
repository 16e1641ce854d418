"""Tensors of models, parameters then buffers, to be laid out and cut."""

from __future__ import annotations

import torch
from torch import nn

from paceline.servers.fragments import cut
from paceline.tensors.layout import Layout


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Conv2d(6, 16, 5),
        nn.Linear(400, 120),
        nn.Linear(120, 84),
        nn.Linear(84, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10))


def embedding() -> nn.Module:
    """400 MB in one parameter, and a little beside it."""
    return nn.Sequential(nn.Embedding(1_000_000, 100), nn.Linear(100, 256), nn.BatchNorm1d(256), nn.Linear(256, 1))


MODELS = {"LeNet": lenet, "an MLP": mlp, "one large embedding": embedding}


def layout_of(name: str) -> tuple[Layout, int]:
    """The model's layout (nothing of it is allocated), and how many of its tensors are parameters."""
    with torch.device("meta"):
        model = MODELS[name]()
    parameters = list(model.parameters())
    return Layout.of([*parameters, *model.buffers()], len(parameters)), len(parameters)


def sizes_of(name: str) -> list[int]:
    """The bytes of each of the model's fragments."""
    layout, count = layout_of(name)
    return [fragment.nbytes(layout) for fragment in cut(layout, count)]
