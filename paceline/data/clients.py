"""Which samples belong to which client, and the batches each trains in a round. Pure.

Either a split is made here, for trying: evenly (`iid`), or by label after Dirichlet's distribution; or the data says it,
by a key for each sample. Every sample belongs to exactly one client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import Ids, mix, shuffled
from paceline.data.partition import Shares, evenly
from paceline.errors import UsageError

_DIRICHLET, _DEALT = 311, 312


def iid(samples: int, clients: int, seed: int) -> list[Ids]:
    """Shuffled and cut into parts whose sizes differ by at most one."""
    _check(samples, clients)
    order = shuffled(np.arange(samples, dtype=np.int64), samples, mix(seed, _DEALT))
    return [np.sort(order[first:last]) for first, last in evenly(samples, clients)]


def dirichlet(labels: NDArray[Any], clients: int, alpha: float, seed: int) -> list[Ids]:
    """Each label's samples, shuffled, go to the clients in proportions drawn from Dirichlet(α): the smaller α is, the fewer
    labels a client has. A client to whom nothing falls gets one sample of whoever has most.

    >>> [part.tolist() for part in dirichlet(np.array([0, 0, 0, 1, 1, 1]), clients=2, alpha=0.3, seed=5)]
    [[0, 1, 3, 4, 5], [2]]
    """
    _check(len(labels), clients)
    draws = np.random.Generator(np.random.PCG64(mix(seed, _DIRICHLET)))
    parts: list[list[Ids]] = [[] for _ in range(clients)]
    for number, label in enumerate(np.unique(labels)):
        mine = np.flatnonzero(labels == label)
        mine = mine[shuffled(np.arange(len(mine), dtype=np.int64), len(mine), mix(seed, _DEALT, number))]
        edges = np.round(np.cumsum(draws.dirichlet([alpha] * clients)) * len(mine)).astype(np.int64)
        edges[-1] = len(mine)
        for client, (first, last) in enumerate(zip([0, *edges], edges, strict=False)):
            parts[client].append(mine[first:last])
    found = [np.sort(np.concatenate(part)) for part in parts]
    while not min(sizes := [len(part) for part in found]):
        rich, poor = int(np.argmax(sizes)), int(np.argmin(sizes))
        found[rich], found[poor] = found[rich][:-1], found[rich][-1:]
    return found


def by_key(keys: NDArray[Any]) -> list[Ids]:
    """One client for each key, in the order of the keys."""
    _, numbers = np.unique(keys, return_inverse=True)
    order = np.argsort(numbers, kind="stable").astype(np.int64)
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _check(samples: int, clients: int) -> None:
    if clients < 1:
        raise UsageError(
            "--strategy federated: say how many clients the data is split over (clients=8), or give the loader's samples "
            "their keys: paceline.clients(loader, by=users)"
        )
    if samples < clients:
        raise UsageError(f"--strategy federated: {samples} samples are too few for {clients} clients")


class ClientShares(Shares):
    """A round is a step of the run, a client a slot, a step here one of its batches.

    Its order is another one each round, and each time it goes through its data in a round.
    """

    def __init__(
        self,
        clients: Sequence[Ids | None],
        batch: int,
        seed: int,
        epochs: int = 1,
        steps: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """None: that client's data is elsewhere. `steps`: so many batches in a round, instead of `epochs`."""
        self.clients, self._batch, self._seed, self._shuffle = clients, batch, seed, shuffle
        self.steps = 1
        counts = [0 if ids is None else len(ids) for ids in clients]
        self._per_epoch = [max(1, n // batch) if drop_last else -(-n // batch) for n in counts]
        self.sizes_of = [n if n < batch or not drop_last else n // batch * batch for n in counts]
        """Samples that each client goes through."""
        self.batches = [(steps or epochs * per) if n else 0 for n, per in zip(counts, self._per_epoch, strict=True)]
        """Of each client in a round."""

    @property
    def here(self) -> list[int] | None:
        """The clients whose data is here; None: all."""
        if all(ids is not None for ids in self.clients):
            return None
        return [client for client, ids in enumerate(self.clients) if ids is not None]

    def _size(self, step: int, client: int) -> int:
        if client >= len(self.clients) or step >= self.batches[client]:
            return 0
        return min(self._batch, self.sizes_of[client] - step % self._per_epoch[client] * self._batch)

    def ids(self, epoch: int, step: int, slot: int) -> Ids:
        size = self._size(step, slot)
        if not size:
            return np.empty(0, dtype=np.int64)
        mine = self.clients[slot]
        assert mine is not None
        time, number = divmod(step, self._per_epoch[slot])
        at = np.arange(number * self._batch, number * self._batch + size, dtype=np.int64)
        return mine[shuffled(at, len(mine), mix(self._seed, epoch, slot, time)) if self._shuffle else at]

    def sizes(self, epoch: int, step: int) -> list[int]:
        return [self._size(step, client) for client in range(len(self.clients))]
