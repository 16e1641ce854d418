"""Data sets and loaders for tests, and what a worker gets of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from paceline.data.loader import Feed, Share
from paceline.data.partition import Split

EVEN, ROWS = Split(), Split("rows")
CPU = torch.device("cpu")
Steps = list[list[Any]]


def steps_of(feed: Feed, slots: range, epoch: int = 0, first: int = 0, steps: int | None = None) -> Steps:
    """What a worker that carries these slots gets, from a step on."""
    feed.start(epoch, first, slots)
    last = steps if steps is not None else feed.steps
    assert last is not None
    got = [[value(feed.share(epoch, step, slot)) for slot in slots] for step in range(first, last)]
    feed.stop()
    return got


def value(share: Share | None) -> Any:
    return None if share is None else share.value


def plain(value: Any) -> Any:
    """Tensors as lists, so that nested shares can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


class Augmented(Dataset[Any]):
    """Each sample draws from every global generator, as augmentation does."""

    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), float(np.random.random())]), index


class Many(Augmented):
    """Fetches a whole list of samples in one call."""

    asked: list[list[int]] | None = None

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.asked is not None:
            self.asked.append(list(indices))
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """So many samples; each draws from torch's generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([float(k), torch.rand(()).item()]) for k in range(self.n))


def own_collate(samples: list[Any]) -> Any:
    """The default one, but not by identity: loaders that use it take the general path."""
    return default_collate(samples)


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n * 3.0).view(n, 3), torch.arange(n))
