"""From a user's DataLoader to the batches of clients: who has which of its samples, and who may say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from paceline.data.client_folders import ClientFolders
from paceline.data.clients import ClientShares, by_key, dirichlet, iid
from paceline.data.dealing import Dealing
from paceline.data.loader import Feed, feed_of
from paceline.data.order import Ids
from paceline.errors import UsageError, a_kind

if TYPE_CHECKING:
    from paceline.strategies.federation import Federation

_SAID = "_paceline_clients"
Column = Sequence[Any] | NDArray[Any] | torch.Tensor | Callable[[int], Any]
"""A value for each sample, or a function that gives it by the sample's number."""


def clients(loader: DataLoader[Any], *, by: Column | None = None, labels: Column | None = None) -> DataLoader[Any]:
    """Say whose the samples of a loader are, for `--strategy federated`; before run.prepare(). Returns the loader.

    `by`: a key for each sample; one client for each key. `labels`: what a Dirichlet split goes by, where the data set has
    no `.targets`. Other strategies take no notice.

        paceline.clients(loader, by=[row.user for row in rows])
    """
    if (by is None) == (labels is None):
        raise UsageError("paceline.clients(loader, by=…) or paceline.clients(loader, labels=…): say one of them")
    setattr(loader, _SAID, (by, labels))
    return loader


def client_feed(loader: Any, plan: Federation, seed: int) -> tuple[Feed, ClientShares]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "--strategy federated: a client's samples are taken by number; give a DataLoader over a map-style set"
        )
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            "--strategy federated: each client's batches are cut from its own samples, so the loader can have no sampler of "
            "its own; give DataLoader(data, batch_size=…, shuffle=True)"
        )
    parts = _parts(loader, plan, seed)
    plan.drawn(len(parts))
    shuffle = type(sampler) is RandomSampler
    shares = ClientShares(parts, batches.batch_size, seed, plan.epochs, plan.steps, shuffle, batches.drop_last)
    sizes = tuple(0 if part is None else len(part) for part in parts)
    known = sum(sizes) if all(sizes) else 0
    dealing = Dealing("clients", len(parts), seed, known, batch=batches.batch_size, clients=sizes)
    return feed_of(loader, shares, dealing), shares


def _parts(loader: DataLoader[Any], plan: Federation, seed: int) -> Sequence[Ids | None]:
    data, (by, labels) = loader.dataset, getattr(loader, _SAID, (None, None))
    if isinstance(data, ClientFolders):
        return _own_parts(data, plan)
    samples = len(data)  # type: ignore[arg-type]
    if by is not None:
        parts = by_key(_column(by, samples, "by"))
        if plan.clients and plan.clients != len(parts):
            raise UsageError(
                f"--strategy federated:clients={plan.clients}: the loader's samples have {len(parts)} keys; leave clients out"
            )
        return parts
    if not plan.alpha:
        return iid(samples, plan.clients, seed)
    found = _column(labels, samples, "labels") if labels is not None else _labels(data)
    return dirichlet(found, plan.clients, plan.alpha, seed)


def _own_parts(data: ClientFolders, plan: Federation) -> Sequence[Ids | None]:
    if plan.clients <= data.here[-1]:
        raise UsageError(
            f"--strategy federated:clients={plan.clients}: there is a folder for client {data.here[-1]}; say how many clients "
            "there are on all machines together, and number their folders from 0 on"
        )
    parts = [data.ids(client) for client in range(plan.clients)]
    if empty := [client for client, part in enumerate(parts) if part is not None and not len(part)]:
        raise UsageError(f"ClientFolders: the folder of client {empty[0]} has no sample")
    return parts


def _column(given: Column, samples: int, name: str) -> NDArray[Any]:
    values = [given(number) for number in range(samples)] if callable(given) else given
    found = np.asarray(values)
    if found.shape != (samples,):
        raise UsageError(
            f"paceline.clients(loader, {name}=…): {found.shape} values for {samples} samples; give one for each"
        )
    return found


def _labels(data: Any) -> NDArray[Any]:
    """Where torch's data sets have theirs."""
    if isinstance(data, Subset):
        return np.take(_labels(data.dataset), data.indices)
    for values in (getattr(data, "targets", None), *reversed(getattr(data, "tensors", ()))):
        found = None if values is None else np.asarray(values)
        if found is not None and found.shape == (len(data),):
            return found
    raise UsageError(
        f"--strategy federated:alpha=…: the labels of {a_kind(data)} are not known; give it .targets, or say them: "
        "paceline.clients(loader, labels=labels)"
    )
