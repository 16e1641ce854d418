"""Clicks on advertisements, made up: as many of them, over as many ids, as are asked for. No table of anything is kept.

A sample has NUMBERS numbers, FIELDS ids (who, where, what, …) and whether it was clicked.

    rank    of each field: drawn from {1, …, ids}, rank r with a probability about in proportion to r ** -1.05 (Zipf)
    id      of each field: a hash of (field, rank), 64 bits; two fields have no id in common
    weight  of each id: a hash of the id, uniform in [-1, 1]
    taste   of each id: four more of these
    logit   -1 + the numbers' sum / 2 + 0.8 · the weights' sum + 2 · taste of the first id · taste of the second
    click   with probability 1 / (1 + exp(-logit))

Everything is drawn by numpy's PCG64 from a seed, and the hashes are SplitMix64's: the same data on any machine.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

FIELDS, NUMBERS, TASTES = 8, 4, 4
EXPONENT = 1.05


def clicks(count: int, ids: int = 100_000_000, seed: int = 0) -> TensorDataset:
    """So many samples whose fields have so many ids together: (numbers, ids, clicked or not)."""
    draw = np.random.default_rng(seed)
    ranks = _zipf(draw.random((count, FIELDS)), ids // FIELDS)
    names = _hashed(ranks.astype(np.uint64) * np.uint64(FIELDS) + np.arange(FIELDS, dtype=np.uint64))
    numbers = draw.standard_normal((count, NUMBERS))
    tastes = [_uniform(names[:, :2], salt) for salt in range(1, 1 + TASTES)]
    matching = sum(each[:, 0] * each[:, 1] for each in tastes)
    logit = -1.0 + numbers.sum(1) / 2 + 0.8 * _uniform(names).sum(1) + 2.0 * matching
    clicked = draw.random(count) < 1 / (1 + np.exp(-logit))
    return TensorDataset(
        torch.from_numpy(numbers).float(), torch.from_numpy(names.view(np.int64)), torch.from_numpy(clicked).float()
    )


def _zipf(u: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Ranks from uniform numbers, by the inverse of the distribution's integral."""
    s = 1 - EXPONENT
    return (((most + 1.0) ** s - 1) * u + 1) ** (1 / s) // 1


def _hashed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _uniform(ids: NDArray[np.uint64], salt: int = 0) -> NDArray[np.float64]:
    return (_hashed(ids + np.uint64(salt)) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def auc(score: torch.Tensor, clicked: torch.Tensor) -> float:
    """The chance that one that was clicked has a greater score than one that was not; equal scores count half."""
    _, group, size = torch.unique(score.double(), return_inverse=True, return_counts=True)
    rank = (size.cumsum(0).double() - (size.double() - 1) / 2)[group]
    yes = clicked.sum().item()
    above = rank[clicked.bool()].sum().item() - yes * (yes + 1) / 2
    return above / (yes * (len(score) - yes))
