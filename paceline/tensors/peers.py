"""The workers of one term, as a group that can add up tensors and exchange small messages.

A strategy talks to `Peers` and to nothing below it. A group belongs to one term: when the membership
changes it is abandoned, never repaired, and a new one is built.

At a reduce point every worker calls, in this order:

    peers.open(plan, layout, lanes)
    …fill peers.parts()…                 memory for this worker's partial sums
    peers.post(bucket)                   a bucket may leave while the rest is still computed
    rows = peers.exchange(key, lanes)    everybody's lanes; all partial sums are in place afterwards
    flats = peers.total(call, divisor)   the tree's total, in memory of this worker's own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import TermEnded as TermEnded
from paceline.tensors.layout import Layout
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan

Lanes = NDArray[np.int64]
Parts = list[list[torch.Tensor]]
"""For each partial sum of this worker, its flats."""


class Peers(Protocol):
    rank: int
    size: int
    device: torch.device
    """Where the parts and the total lie."""
    reads_late: bool
    """Whether the parts are read only once all have met: until then they may still be changed."""
    ends_together: bool
    """Whether a death ends the term at the same meeting for all who remain. Else some may have completed
    one meeting more than others; never more, for a meeting completes only once every member has entered it."""

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for others, so far."""

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent to others so far: put on connections, or into shared memory for them where there are
        none. Between machines only what leaves one counts."""

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None: ...
    def parts(self) -> Parts: ...
    def post(self, bucket: int) -> None: ...
    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]: ...
    def repost(self, buckets: Sequence[int]) -> None:
        """All agree that these buckets left too early: send them again."""

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        """The total over `divisor`, in this worker's memory for the call-th point of a step: nobody
        else touches it until all have come to the next point of that number."""

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        """Every worker's payload, in the order of ranks."""

    def close(self) -> None: ...


@runtime_checkable
class Trading(Peers, Protocol):
    """Peers of which two can exchange something that nobody else is sent."""

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        """What the partner has brought to this meeting, to whom this worker is one. Who has none comes, too. It may be
        over for some who have what they came for, and end with the term for others."""


class Memory:
    """Private flats by number, made when first asked for. Totals have one set for each reduce point
    of a step: a GAN's first gradients outlive its second."""

    def __init__(self, device: torch.device, lent: bool = False) -> None:
        self._device, self._lent = device, lent
        self._layout: Layout | None = None
        self._of: dict[int, list[torch.Tensor]] = {}

    def open(self, layout: Layout) -> None:
        if layout is not self._layout:
            self._layout, self._of = layout, {}

    def of(self, number: int) -> list[torch.Tensor]:
        assert self._layout is not None
        if number not in self._of:
            self._of[number] = self._layout.allocate(self._device, self._lent)
        return self._of[number]


class Alone:
    """A group of one: the same interface, no one to wait for."""

    rank, size, waited_s, sent_bytes, reads_late, ends_together = 0, 1, 0.0, 0, True, True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts, self._totals = Memory(device), Memory(device)

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._parts.open(layout)
        self._totals.open(layout)

    def parts(self) -> Parts:
        return [self._parts.of(0)]

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        return lanes[None]

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        out = self._totals.of(call)
        for part, flat in zip(self._parts.of(0), out, strict=True):
            TreeSum([part], (), [flat]).add(divisor)
        return out

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        return [payload]

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        return b""

    def close(self) -> None:
        return


class SharesWanted(Exception):
    """The meeting waits for these shares: this worker is to compute them too, and to come again."""

    def __init__(self, leaves: Sequence[int]) -> None:
        super().__init__(f"shares {', '.join(map(str, leaves))} are wanted")
        self.leaves = list(leaves)


class Watch(Protocol):
    """What a group does while it waits, and when the workers turn out to be at different places."""

    def check(self, seconds: float, laggard: int) -> None:
        """Called at least every 10 ms of a wait for this worker; raises to end it.

        It ends with `TermEnded` only if the worker waited for is gone. Where a group ends together, all
        that remain end at the same meeting: the first one for which the dead worker has not done its part.
        """

    def mismatch(self, others: list[int]) -> NoReturn:
        """These workers came to another meeting than this one did."""


def check_keys(keys: Sequence[int], rank: int, watch: Watch) -> None:
    """All workers must have come to the same meeting."""
    mine = keys[rank]
    others = [worker for worker, key in enumerate(keys) if key != mine]
    if others:
        watch.mismatch(others)
