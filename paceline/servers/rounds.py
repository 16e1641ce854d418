"""The register of clients that train apart, round by round. Pure: time is an argument.

A round is a stretch, and one step of the run. A micro-batch is one client's whole training in it: its number is the client's
place (leaf) among those of the round. What it has come to lies at the servers, with a backup, before it is delivered here. So
whatever has *arrived* is never lost, and whoever trains a client again after a death brings the same.

A round is over, and counts, when all who can have arrived; or when a quorum has, and a grace window behind that is over. What
comes later is dropped. If it is over without a quorum it counts for nothing: θ stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from paceline.servers.register import Delivered, Receipt, Register


class Closed(msgspec.Struct, frozen=True):
    """A round that is over."""

    arrived: list[tuple[int, int]]
    """(leaf, weight) of those that count, in order; nobody: θ stays as it is."""
    lacking: list[int]
    """Who did not come in time, or whose data nobody has who is there."""
    moved: int
    """Bytes that went to and from the servers."""


class Rounds(Register):
    """
    >>> rounds = Rounds(slots=1)
    >>> rounds.begin(stretch=0, total=3)
    >>> for worker in (0, 1):
    ...     rounds.enter(worker)
    >>> rounds.lease(0, 1), rounds.lease(1, 1)
    ([0], [1])
    >>> rounds.finish(0, [Delivered(0, samples=120, ids=120, digest=7, weight=60)]), rounds.lease(0, 1)
    (True, [2])
    >>> rounds.lose(1)  # its client goes to another
    >>> rounds.finish(0, [Delivered(2, 80, 80, 9, weight=40)]), rounds.lease(0, 1)
    (True, [1])
    >>> rounds.due(quorum=2, grace_s=1.0, waited_s=0.5), rounds.due(quorum=2, grace_s=1.0, waited_s=1.0)
    (False, True)
    >>> rounds.close(quorum=2)
    >>> rounds.closed
    Closed(arrived=[(0, 60), (2, 40)], lacking=[1], moved=0)
    >>> rounds.finish(0, [Delivered(1, 100, 100, 8, weight=50)]), rounds.count, rounds.steps
    (False, 1, 1)
    """

    arrived: dict[int, int] = msgspec.field(default_factory=dict)
    """Of the round in hand, by leaf: what it counts for, the samples that the client has."""
    closed: Closed | None = None
    """Once it is over."""
    moved: int = 0
    members: list[int] = msgspec.field(default_factory=list)
    """Who is expected to enter it."""
    here: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """By worker, the leaves that it can train; one that is not named can train all."""
    scheduled: int = 0
    """Which of the script's schedulers are stepped within its loop."""

    def begin(self, stretch: int, total: int, epoch: int = 0, loader: int = -1, last: int = 0) -> None:
        if stretch > self.stretch:
            self.arrived, self.closed, self.moved, self.members, self.here = {}, None, 0, [], {}
            super().begin(stretch, total, epoch, loader, last)

    @property
    def over(self) -> bool:
        return self.closed is not None or (bool(self.stop) and not any(self.held.values()))

    def at_rest(self) -> Self:
        """Another life's workers have numbers of their own, and data of their own."""
        return msgspec.structs.replace(super().at_rest(), members=[], here={})

    # clients

    def _can(self, worker: int, leaf: int) -> bool:
        return worker not in self.here or leaf in self.here[worker]

    def lease(self, worker: int, want: int) -> list[int]:
        if worker in self.gone or worker not in self.trainers:
            return []
        mine = self.held.setdefault(worker, [])
        taken = {leaf for theirs in self.held.values() for leaf in theirs}
        for leaf in range(self.total):
            if len(mine) >= want or self.stop or self.closed:
                break
            if leaf not in taken and leaf not in self.arrived and self._can(worker, leaf):
                mine.append(leaf)
        return mine

    def finish(self, worker: int, delivered: Sequence[Delivered]) -> bool:
        if self.closed:  # too late
            self.held.pop(worker, None)
            return False
        return super().finish(worker, delivered)

    def _receipt(self, each: Delivered) -> None:
        self.arrived[each.number] = each.weight
        self.moved += each.moved
        super()._receipt(each)

    def step_of(self, number: int) -> int:
        return self.first

    def _whole(self, receipt: Receipt) -> bool:
        return False  # a round's receipt is whole when it is over

    # the end of a round

    @property
    def reached(self) -> int:
        """How many have arrived."""
        return len(self.arrived)

    def due(self, quorum: int, grace_s: float, waited_s: float) -> bool:
        """Whether the round is over now, `waited_s` after the quorum was there."""
        if self.closed or self.stretch < 0:
            return False
        if quorum and self.reached >= quorum and waited_s >= grace_s:
            return True
        rest = [leaf for leaf in range(self.total) if leaf not in self.arrived]
        return not rest or (
            self._all_there and not any(self._can(worker, leaf) for worker in self.trainers for leaf in rest)
        )

    @property
    def _all_there(self) -> bool:
        """Whether all have entered who are expected, and are not gone."""
        return set(self.members) <= {*self.trainers, *self.gone}

    def close(self, quorum: int) -> None:
        receipt = Receipt(self.steps, self.epoch, self.loader, 0)
        lacking = [leaf for leaf in range(self.total) if leaf not in self.arrived]
        if self.reached >= quorum:
            receipt = self.open.get(self.steps, receipt)
        else:
            self.samples -= sum(each.samples for each in self.open.values())
            self.arrived = {}
        self.closed = Closed(sorted(self.arrived.items()), lacking, self.moved)
        self.held, self.open, self.count = {}, {}, self.count + 1
        self.receipts, self.steps = [*self.receipts, receipt], self.steps + 1
