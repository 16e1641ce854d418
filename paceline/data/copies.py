"""A user's DataLoader copied and aimed elsewhere; its draws follow the sample, not the place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.order import mix
from paceline.data.random import next_draws, seeded, set_seed

ORIGINAL = "_paceline_original"
"""Where a loader that the run has adopted keeps the class it had."""
_COLLATE = 8  # keeps the seeds of collation apart from those of steps and items
_KNOWN = 1
with seeded(_KNOWN):
    _UNTOUCHED = next_draws()


class Seeded(Dataset[Any]):
    """A map-style data set whose random augmentation depends on the sample alone.

    Seeding every generator for every sample costs more than many data sets do. So a share is fetched
    under a known seed first; if a generator was drawn from, the share is fetched again with a seed a
    sample, and from then on all are.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._many = getattr(inner, "__getitems__", None)
        self._draws = False

    def __getitem__(self, tagged: tuple[int, int]) -> Any:
        key, index = tagged
        set_seed(mix(key, index))
        return self.inner[index]

    def __getitems__(self, tagged: tuple[int, list[int]]) -> Any:
        key, ids = tagged
        samples = self._fetch(key, ids)
        set_seed(mix(key, ids[0], _COLLATE))  # a collate_fn may draw too (masking, mixing)
        return samples

    def _fetch(self, key: int, ids: list[int]) -> Any:
        if self._many is not None:
            set_seed(mix(key, ids[0]))
            return self._many(ids)
        if not self._draws:
            set_seed(_KNOWN)
            inner = self.inner
            samples = [inner[index] for index in ids]
            if next_draws() == _UNTOUCHED:
                return samples
            self._draws = True
        return [self[key, index] for index in ids]


def copy_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of the loader as the user made it, even if the run has adopted it since."""
    inner = copy.copy(loader)
    inner.__class__ = getattr(type(loader), ORIGINAL, type(loader))
    inner.__dict__["_iterator"] = None
    return inner


def with_sampler(loader: DataLoader[Any], sampler: Any, dataset: Any) -> DataLoader[Any]:
    """A copy of the loader that draws its batches from `sampler`.

    DataLoader forbids setting these names after construction, but says nothing about a copy's dict:
    a rebuilt loader would lose a subclass's own attributes.
    """
    inner = copy_of(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # in_order=False would deliver whichever batch is ready first, under another one's name.
    inner.__dict__.update({name: sampler, "dataset": dataset, "in_order": True})
    return inner


def strided(loader: DataLoader[Any], first: int, stride: int, key: int) -> Iterator[tuple[int, Any]]:
    """The loader's own batches number first, first + stride, …, each with its number; draws follow the sample."""
    if isinstance(loader.dataset, IterableDataset):
        for number, item in enumerate(copy_of(loader)):
            if number % stride == first:
                yield number, item
        return
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    mine = list(source)[first::stride]
    inner = with_sampler(loader, [(key, ids) for ids in mine], Seeded(loader.dataset))
    yield from zip(range(first, first + stride * len(mine), stride), inner, strict=True)
