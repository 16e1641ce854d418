"""From a user's DataLoader to the shares of this worker's slots.

The user's loader keeps its collate function, worker processes, pinning and subclass. Only its batch
sampler is replaced, on a copy; the loader the user holds turns into a view of the run: iterating it
gives global batches, and its length is the steps of an epoch at any worker count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.data.copies import ORIGINAL, Seeded, copy_of, fetched_by, with_sampler
from paceline.data.dealing import Dealing
from paceline.data.order import Ids, Order, Sampled, Shuffled, mix
from paceline.data.partition import BatchShares, GivenBatches, ItemShares, Shares, Split
from paceline.data.random import set_seed
from paceline.data.values import leading_size, pinned
from paceline.errors import UsageError, a_kind

_END = object()
_ITEM = 7  # keeps the seeds of items apart from those of steps and of collation


class Share(NamedTuple):
    """One slot's part of one batch: what was collated, and which samples were fetched for it."""

    value: Any
    ids: Ids
    """As they were handed to the data set, not as the plan says: a receipt is made of them."""


class Feed(Protocol):
    """Where a run's shares come from, whatever the user's loader was."""

    dealing: Dealing
    """Which ids a step should get, for whoever checks its receipt."""

    @property
    def steps(self) -> int | None:
        """Steps of an epoch; None when only the stream knows."""

    batch: int | None
    """The global batch, where there is one."""

    depth: int
    """How many shares it reads ahead."""

    def start(self, epoch: int, first_step: int, slots: Sequence[int]) -> None:
        """Aim at a position; the next `share` is (first_step, slots[0])."""

    def follow(self, epoch: int, places: Iterable[tuple[int, int]]) -> None:
        """Instead: these are the next shares, (step, slot) each; there may be more of them later."""

    def order_digest(self, epoch: int) -> int:
        """Of the order of the epoch's ids, where a user's sampler deals them; else 0."""

    def sizes(self, epoch: int, step: int) -> list[int] | None:
        """Samples in each slot's share, or None if that is known only once they are loaded."""

    def share(self, epoch: int, step: int, slot: int) -> Share | None:
        """The share, or None when this slot has no sample in this step. Any slot's: those that were aimed
        at come from the loader as it reads ahead, another one is fetched here and now."""

    def stand_in(self, epoch: int, step: int) -> Any:
        """Some sample of this step, for a worker whose slot has none. It is another slot's: copy it."""

    def stop(self) -> None:
        """Let go of loader processes."""


def _any_id(shares: Shares, epoch: int, step: int) -> int:
    slot = next(slot for slot, size in enumerate(shares.sizes(epoch, step)) if size)
    return int(shares.ids(epoch, step, slot)[0])


class MapFeed:
    """Any map-style data set. A share is fetched when it is asked for: what a DataLoader without processes does around
    that (an iterator, an entry in a profile) costs more than the rest of a step's feeding."""

    def __init__(self, loader: DataLoader[Any], shares: Shares, dealing: Dealing) -> None:
        self.batch, self.dealing = loader.batch_size, dealing
        self._shares, self._sized = shares, not isinstance(shares, ItemShares)
        self._data, self._collate = Seeded(loader.dataset, loader.collate_fn), loader.collate_fn
        self._single = loader.batch_sampler is None
        self._pin = loader.pin_memory and torch.cuda.is_available()
        self._key = self.depth = 0

    def start(self, epoch: int, first_step: int, slots: Sequence[int]) -> None:
        self._begin(epoch)

    def follow(self, epoch: int, places: Iterable[tuple[int, int]]) -> None:
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self._shares.begin(epoch)
        self._key = mix(self.dealing.seed, epoch, _ITEM)

    @property
    def steps(self) -> int | None:
        return self._shares.steps

    def order_digest(self, epoch: int) -> int:
        return self._shares.digest(epoch)

    def sizes(self, epoch: int, step: int) -> list[int] | None:
        return self._shares.sizes(epoch, step) if self._sized else None

    def share(self, epoch: int, step: int, slot: int) -> Share | None:
        ids = self._shares.ids(epoch, step, slot)
        return Share(self._fetch(ids), ids) if len(ids) else None

    def _fetch(self, ids: Ids) -> Any:
        """Here and now."""
        if self._single:
            value = self._collate(self._data[self._key, int(ids[0])])
        else:
            value = self._data.__getitems__((self._key, ids.tolist()))
        return pinned(value) if self._pin else value

    def stand_in(self, epoch: int, step: int) -> Any:
        index = _any_id(self._shares, epoch, step)
        set_seed(mix(index))
        sample = self._data.inner[index]
        return sample if self._single else self._collate([sample])

    def stop(self) -> None:
        return


class _Aim:
    """A batch sampler that can be pointed at a position: (epoch, step) and the slots to serve."""

    def __init__(self, shares: Shares, single: bool) -> None:
        self.shares, self._single = shares, single
        self.epoch, self.key = 0, 0
        self.slots: Sequence[int] = ()
        self.places: Callable[[], Iterable[tuple[int, int]]]
        self.asked: deque[tuple[tuple[int, int], Ids]] = deque()
        """(step, slot) and ids of what the loader was told to fetch and has not delivered yet; it does so in turn."""

    def __iter__(self) -> Iterator[Any]:
        self.asked = deque()  # of this iterator alone: what an older one was asked for never comes
        return self._ask(self.asked)

    def _ask(self, asked: deque[tuple[tuple[int, int], Ids]]) -> Iterator[Any]:
        key = self.key
        for step, slot in self.places():
            ids = self.shares.ids(self.epoch, step, slot)
            if not len(ids):
                continue
            asked.append(((step, slot), ids))
            yield (key, int(ids[0])) if self._single else (key, ids.tolist())

    def __len__(self) -> int:
        return self.shares.steps * len(self.slots)


class AheadFeed(MapFeed):
    """The same through the user's own DataLoader: its processes read ahead, or it is of a kind of its own."""

    def __init__(self, loader: DataLoader[Any], shares: Shares, dealing: Dealing) -> None:
        super().__init__(loader, shares, dealing)
        self._aim = _Aim(shares, self._single)
        self._loader, self._own_way = with_sampler(loader, self._aim, self._data), _goes_its_own_way(loader)
        self.depth = loader.num_workers * (loader.prefetch_factor or 0)
        self._items: Iterator[Any] | None = None
        self._early: dict[tuple[int, int], Share] = {}

    def start(self, epoch: int, first_step: int, slots: Sequence[int]) -> None:
        super().start(epoch, first_step, slots)
        steps = range(first_step, self._shares.steps)
        self._read(epoch, slots, lambda: ((step, slot) for step in steps for slot in slots))

    def follow(self, epoch: int, places: Iterable[tuple[int, int]]) -> None:
        super().follow(epoch, places)
        self._read(epoch, range(self.dealing.slots), lambda: places)

    def _read(self, epoch: int, slots: Sequence[int], places: Callable[[], Iterable[tuple[int, int]]]) -> None:
        aim = self._aim
        aim.epoch, aim.slots, aim.places, aim.key = epoch, slots, places, self._key
        self._items, self._early = iter(self._loader), {}

    def share(self, epoch: int, step: int, slot: int) -> Share | None:
        if self._items is None or not self._shares.sizes(epoch, step)[slot]:
            return None
        if (step, slot) in self._early:
            return self._early.pop((step, slot))
        while slot in self._aim.slots and (item := next(self._items, _END)) is not _END:
            place, ids = self._aim.asked.popleft()
            share = Share(item, ids)
            if place == (step, slot):
                return share
            # Asked for out of order: slots were dealt anew. What is passed over may still be wanted in this step.
            self._early = {known: value for known, value in self._early.items() if known[0] == step}
            self._early[place] = share
        return super().share(epoch, step, slot)

    def _fetch(self, ids: Ids) -> Any:
        if not self._own_way:
            return super()._fetch(ids)
        tagged = (self._key, int(ids[0]) if self._single else ids.tolist())
        return fetched_by(self._loader, tagged, self._data)

    def stand_in(self, epoch: int, step: int) -> Any:
        if not self._own_way:
            return super().stand_in(epoch, step)
        return self._fetch(np.array([_any_id(self._shares, epoch, step)]))

    def stop(self) -> None:
        self._items = None


class TensorFeed:
    """A TensorDataset under the default collate: rows are taken by one indexed copy."""

    def __init__(self, loader: DataLoader[Any], shares: Shares, dealing: Dealing) -> None:
        self.steps: int | None = shares.steps
        self.batch, self.dealing, self.depth = loader.batch_size, dealing, 0
        self._shares = shares
        self._tensors = loader.dataset.tensors  # type: ignore[attr-defined]
        self._pin = loader.pin_memory and torch.cuda.is_available()

    def start(self, epoch: int, first_step: int, slots: Sequence[int]) -> None:
        return

    def follow(self, epoch: int, places: Iterable[tuple[int, int]]) -> None:
        return

    def order_digest(self, epoch: int) -> int:
        return self._shares.digest(epoch)

    def sizes(self, epoch: int, step: int) -> list[int] | None:
        return self._shares.sizes(epoch, step)

    def share(self, epoch: int, step: int, slot: int) -> Share | None:
        ids = self._shares.ids(epoch, step, slot)
        if not len(ids):
            return None
        rows = torch.from_numpy(ids)
        share = [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors]
        return Share(pinned(share) if self._pin else share, ids)

    def stand_in(self, epoch: int, step: int) -> Any:
        first = _any_id(self._shares, epoch, step)
        return [tensor[first : first + 1] for tensor in self._tensors]

    def stop(self) -> None:
        return


class StreamFeed:
    """An IterableDataset: item j belongs to step j // slots, slot j % slots.

    Every worker reads the whole stream and keeps its own items, so that all know how large the
    others' are and when it ends; a resume skips what was trained. An item's id is its place in the stream.
    """

    def __init__(self, loader: Iterable[Any], dealing: Dealing) -> None:
        self.steps: int | None = None
        self.batch: int | None = None
        self.dealing, self.depth = dealing, 0
        self._loader, self._slots, self._seed = loader, dealing.slots, dealing.seed
        self._items: Iterator[Any] = iter(())
        self._epoch, self._step, self._at = 0, -1, 0
        self._held: list[Share | None] = []

    def start(self, epoch: int, first_step: int, slots: Sequence[int]) -> None:
        self._epoch, self._step, self._at = epoch, -1, 0
        set_seed(mix(self._seed, epoch, _ITEM))
        self._items = iter(self._loader)
        while self._step < first_step - 1:
            self._read_step()

    def follow(self, epoch: int, places: Iterable[tuple[int, int]]) -> None:
        raise UsageError("a stream cannot be taken out of turn")

    def order_digest(self, epoch: int) -> int:
        return 0

    def _read_step(self) -> None:
        self._held, self._step = [], self._step + 1
        for _ in range(self._slots):
            set_seed(mix(self._seed, self._epoch, _ITEM, self._at))
            item = next(self._items, None)
            self._held.append(None if item is None else Share(item, np.array([self._at])))
            self._at += 1

    def sizes(self, epoch: int, step: int) -> list[int] | None:
        while self._step < step:
            self._read_step()
        return [0 if share is None else leading_size(share.value) for share in self._held]

    def share(self, epoch: int, step: int, slot: int) -> Share | None:
        while self._step < step:
            self._read_step()
        return self._held[slot]

    def stand_in(self, epoch: int, step: int) -> Any:
        return None if self._held[0] is None else self._held[0].value

    def stop(self) -> None:
        self._items, self._held = iter(()), []


def build_feed(loader: Any, slots: int, split: Split, seed: int) -> Feed:
    """The feed for what the user gave to prepare()."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"prepare() was given {a_kind(loader)} as loader; give a torch DataLoader "
            "(for arrays: DataLoader(TensorDataset(torch.from_numpy(x), ...), batch_size=...))"
        )
    if isinstance(loader.dataset, IterableDataset):
        return StreamFeed(copy_of(loader), Dealing("stream", slots, seed))
    _refuse_a_part(loader)
    n = _size_of(loader.dataset)
    batches, feed = loader.batch_sampler, AheadFeed if _reads_by_itself(loader) else MapFeed
    if batches is not None and type(batches) is not BatchSampler:
        given = GivenBatches(batches, slots, split, seed)
        return feed(loader, given, Dealing("given", slots, seed, n))
    order = _order_of(loader.sampler, n, seed)
    words = _ORDERS[type(order)]
    if batches is None:
        return feed(loader, ItemShares(order, slots), Dealing("items", slots, seed, n, words, order.n))
    batch, drop_last = batches.batch_size, batches.drop_last
    kind = "rows" if split.kind == "rows" else "batches"
    dealing = Dealing(kind, slots, seed, n, words, order.n, batch, drop_last)
    shares = _shares_of(order, dealing, split, type(loader.sampler).__name__)
    if shares.steps == 0:
        raise UsageError(f"drop_last=True with a batch of {batch} leaves no step in a data set of {n} samples")
    return feed_of(loader, shares, dealing)


def feed_of(loader: DataLoader[Any], shares: Shares, dealing: Dealing) -> Feed:
    """Of a map-style data set in batches that are cut here."""
    if _reads_by_itself(loader):
        return AheadFeed(loader, shares, dealing)
    rows = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
    return (TensorFeed if rows else MapFeed)(loader, shares, dealing)


def _reads_by_itself(loader: DataLoader[Any]) -> bool:
    return loader.num_workers > 0 or _goes_its_own_way(loader)


def _goes_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether a subclass has its own way to go through its batches, in which it may change them."""
    return any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))


def _shares_of(order: Order, dealing: Dealing, split: Split, sampler: str) -> Shares:
    """The shares of batches that are cut here; `sampler` is the name of the user's."""
    batch, slots = dealing.batch, dealing.slots
    if dealing.kind == "rows":
        if dealing.order == "sampler":
            raise UsageError(
                f"--split rows goes through the data set's own rows, so it cannot follow a {sampler} "
                "as sampler: drop the sampler or use --split even"
            )
        return dealing.rows()
    if batch < slots:
        raise UsageError(
            f"the batch of {batch} is smaller than the {slots} slots, so some would never train: "
            f"raise batch_size to {slots} or more, or pass --slots {batch} (and -n {batch} at most)"
        )
    return BatchShares(order, batch, slots, split, dealing.drop_last)


def _refuse_a_part(loader: DataLoader[Any]) -> None:
    """A DistributedSampler, or one like it, deals each process its part; here all of them must deal the whole."""
    for part in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        replicas = getattr(part, "num_replicas", 1)
        if replicas != 1:
            raise UsageError(
                f"prepare() was given a loader whose {type(part).__name__} deals out one part in {replicas}, so the rest would "
                "never be trained: drop the sampler (shuffle=True instead); Paceline deals the shares itself"
            )


def _size_of(dataset: Any) -> int:
    try:
        n = len(dataset)
    except TypeError:
        raise UsageError(
            f"the data set {type(dataset).__name__} has no length: give it __len__, or make it an IterableDataset"
        ) from None
    if n == 0:
        raise UsageError(f"the data set {type(dataset).__name__} is empty: there is nothing to train on")
    return int(n)


def _order_of(sampler: Any, n: int, seed: int) -> Order:
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return Shuffled(n, seed)
    if type(sampler) is SequentialSampler:
        return Order(n)
    return Sampled(sampler, seed)


_ORDERS: dict[type[Order], str] = {Order: "sequential", Shuffled: "shuffled", Sampled: "sampler"}


def adopt(loader: Any, iterate: Callable[[], Iterator[Any]], length: Callable[[], int]) -> None:
    """Turn the user's loader into a view of the run, in place: the object they hold stays theirs.

    Its class is swapped for a subclass of its own; one base, because Python swaps only classes of the
    same layout.
    """
    kind = type(loader)
    members = {
        "__module__": kind.__module__,
        "__iter__": lambda _self: iterate(),
        "__len__": lambda _self: length(),
        ORIGINAL: kind,
    }
    loader.__class__ = type(kind.__name__, (kind,), members)


def adopted(loader: Any) -> bool:
    return hasattr(type(loader), ORIGINAL)
