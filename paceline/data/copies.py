"""A user's DataLoader copied and aimed elsewhere; its draws follow the sample, not the place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.generators import drawing_from
from paceline.data.order import mix
from paceline.data.random import set_known_seed, set_seed, untouched

ORIGINAL = "_paceline_original"
"""Where a loader that the run has adopted keeps the class it had."""
_COLLATE = 8  # keeps the seeds of collation apart from those of steps and items
_KNOWN = 1


class Seeded(Dataset[Any]):
    """A map-style data set whose random augmentation depends on the sample alone.

    Seeding every generator for every sample costs more than many data sets do. So a share is fetched
    under a known seed first; if a generator was drawn from, the share is fetched again with a seed a
    sample, and from then on all are. What comes in one call (`__getitems__`, a collate_fn) has a seed of its
    own each. Where the first share drew nothing at all, one known seed does for both, until something is drawn.
    """

    def __init__(self, inner: Any, collate: Callable[[Any], Any]) -> None:
        self.inner, self._collate = inner, collate
        self._many = getattr(inner, "__getitems__", None)
        self._draws = False
        """Whether fetching does."""
        self._quiet: bool | None = None
        """Whether neither fetching nor collating does, as far as is known; None before the first share."""

    def __getitem__(self, tagged: tuple[int, int]) -> Any:
        key, index = tagged
        set_seed(mix(key, index))
        return self.inner[index]

    def __getitems__(self, tagged: tuple[int, list[int]]) -> Any:
        """A share, collated."""
        key, ids = tagged
        if self._quiet:
            set_known_seed(_KNOWN)
            share = self._collate(self._plain(ids))
            if untouched():
                return share
            self._quiet = False
        samples, seed = self._fetch(key, ids), mix(key, ids[0], _COLLATE)
        set_seed(seed)  # a collate_fn may draw too (masking, mixing)
        share = self._collate(samples)
        if self._quiet is None:
            self._quiet = untouched() and not self._draws
        return share

    def _fetch(self, key: int, ids: list[int]) -> Any:
        if self._many is not None:
            seed = mix(key, ids[0])
            set_seed(seed)
            samples = self._many(ids)
            if self._quiet is None:
                self._draws = not untouched()
            return samples
        if not self._draws:
            set_known_seed(_KNOWN)
            samples = self._plain(ids)
            if untouched():
                return samples
            self._draws = True
        return [self[key, index] for index in ids]

    def _plain(self, ids: list[int]) -> Any:
        """Under whatever seed there is."""
        if self._many is not None:
            return self._many(ids)
        inner = self.inner
        return [inner[index] for index in ids]


def _as_it_is(share: Any) -> Any:
    return share


def copy_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of the loader as the user made it, even if the run has adopted it since."""
    inner = copy.copy(loader)
    inner.__class__ = getattr(type(loader), ORIGINAL, type(loader))
    inner.__dict__["_iterator"] = None
    return inner


def with_sampler(loader: DataLoader[Any], sampler: Any, data: Seeded) -> DataLoader[Any]:
    """A copy of the loader that draws its batches from `sampler`, as keys and ids of this data.

    DataLoader forbids setting these names after construction, but says nothing about a copy's dict:
    a rebuilt loader would lose a subclass's own attributes.
    """
    inner = copy_of(loader)
    # in_order=False would deliver whichever batch is ready first, under another one's name.
    inner.__dict__.update({"dataset": data, "in_order": True})
    if loader.batch_sampler is None:
        inner.__dict__["sampler"] = sampler
    else:
        inner.__dict__.update({"batch_sampler": sampler, "collate_fn": _as_it_is})
    return inner


def fetched_by(loader: DataLoader[Any], tagged: Any, data: Seeded) -> Any:
    """One batch the way the loader goes, which may be a subclass's own, in this process."""
    inner = with_sampler(loader, [tagged], data)
    inner.__dict__.update({"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0})
    return next(iter(inner))


def strided(loader: DataLoader[Any], first: int, stride: int, key: int) -> Iterator[tuple[int, Any]]:
    """The loader's own batches number first, first + stride, …, each with its number; draws follow the sample."""
    if isinstance(loader.dataset, IterableDataset):
        for number, item in enumerate(copy_of(loader)):
            if number % stride == first:
                yield number, item
        return
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    with drawing_from(source, key):
        mine = list(source)[first::stride]
    inner = with_sampler(loader, [(key, ids) for ids in mine], Seeded(loader.dataset, loader.collate_fn))
    yield from zip(range(first, first + stride * len(mine), stride), inner, strict=True)
