"""A worker's way through the terms of its run: the group of peers it is in now, and the next.

A term ends for a worker in one of two ways. A peer is gone: `TermEnded` comes out of a wait, and whoever
was waiting calls `next` and tries again with those who remain. Or all let a newcomer in, and the first of
the old members hands it the run's state: at the end of a step that they agree on (`boundary`), or, where
they cannot go on with fewer, at the place where they all are (`refill`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from paceline.data.order import mix
from paceline.errors import PeerLostError
from paceline.session import Session
from paceline.state.snapshot import Snapshot
from paceline.tensors.peers import Alone, Peers, TermEnded
from paceline.tensors.segment import Segment

_STATE, _WRITTEN = mix(201), mix(202)
_DONOR = 0
Result = TypeVar("Result")


class Stateful(Protocol):
    """What a newcomer gets, and how."""

    def capture(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...


@dataclass(frozen=True)
class _Recovery:
    """When, on the monotonic clock, a loss was noticed, its view known, and the new group built."""

    noticed: float
    agreed: float
    rebuilt: float

    def words(self, now: float) -> str:
        agreed, rebuilt, met = (f"{(at - self.noticed) * 1e3:.0f} ms" for at in (self.agreed, self.rebuilt, now))
        return f"agreed {agreed}, rebuilt {rebuilt}, gradients met {met}"


class Terms:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._peers: Peers | None = None
        self.on_peers: list[Callable[[Peers], None]] = []
        """Told whenever the group is another one."""
        self._recovery: _Recovery | None = None
        self.catching_up = False
        """A newcomer that has not come to its first batch: what it meets before, the others have met already."""

    @property
    def peers(self) -> Peers:
        """Built when first needed: worker 0 comes to it long before the others, who wait in init() until
        it has reached prepare()."""
        if self._peers is None:
            self._session.board.main_ready = True
            self._peers = self._session.peers()
        return self._peers

    @property
    def meeting(self) -> Peers:
        """With whom to evaluate: a newcomer that catches up does so alone."""
        return Alone(self._session.device) if self.catching_up else self.peers

    def gather(self, key: int, payload: Callable[[], bytes]) -> list[bytes]:
        """Everybody's payload, in the order of ranks, from all who are there in the end."""
        return self.through(lambda: self.meeting.gather(key, payload()))

    def through(self, meet: Callable[[], Result]) -> Result:
        """What comes of a meeting that is repeated, with those who remain, as often as a peer is lost in it."""
        while True:
            try:
                return meet()
            except TermEnded:
                self.next()

    def next(self) -> Peers:
        """A peer is gone: go on with those who remain."""
        noticed = time.monotonic()
        self._session.next_view()
        agreed = time.monotonic()
        peers = self._with(self._session.peers())
        first = self._recovery.noticed if self._recovery else noticed
        self._recovery = _Recovery(first, agreed, time.monotonic())
        return peers

    def committed(self, step: int) -> None:
        """A reduce point was met: if that was the first one after a loss, main says how long it took."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None and self._session.is_main:
            self._session.folder.event(
                "recovered",
                f"{recovery.words(time.monotonic())} after a worker was missed",
                step=step,
                term=self._session.view.term,
                workers=list(self._session.view.members),
            )

    def _with(self, peers: Peers) -> Peers:
        self._peers = peers
        for tell in self.on_peers:
            tell(peers)
        return peers

    def boundary(self, agreed: int, state: Stateful) -> None:
        """A step is over. Enter the term that all have agreed on, if it is a new one."""
        if agreed > self._session.view.term:
            self._change(agreed, state)

    def refill(self, size: int, state: Stateful) -> None:
        """Wait until there are `size` workers. Whoever comes gets the state of right now: all are at this place."""
        while self.peers.size < size:
            try:
                self._change(self._session.announced(size), state)
            except TermEnded:
                self.next()

    def _change(self, term: int, state: Stateful) -> None:
        """Enter an announced view, as all others do here."""
        before = self._session.view.members
        self._session.enter(term)
        peers = self._with(self._session.peers())
        if peers.size <= len(before):
            return  # somebody has left: nobody needs anything
        try:
            self._hand_over(peers, state.capture() if peers.rank == _DONOR else None)
        except TermEnded:
            self.next()

    def join(self, state: Stateful) -> None:
        """A newcomer enters: it gets the run's state before its first batch."""
        self._session.join()
        peers = self._with(self._session.peers())
        try:
            snapshot = self._hand_over(peers, None)
        except TermEnded as ended:
            raise PeerLostError(f"{ended}: this join was overtaken, and another worker will be started") from None
        assert snapshot is not None
        state.restore(snapshot)
        self.catching_up = True
        self._session.healed()

    def _hand_over(self, peers: Peers, snapshot: Snapshot | None) -> Snapshot | None:
        """The donor's state, in shared memory, to the newcomer; the others only wait for it to be written."""
        size = snapshot.nbytes.to_bytes(8, "little") if snapshot else b""
        size = peers.gather(_STATE, size)[_DONOR]
        newcomer = peers.rank == peers.size - 1
        if snapshot is None and not newcomer:
            peers.gather(_WRITTEN, b"")
            return None
        count = int.from_bytes(size, "little")
        memory = Segment(self._session.segment(f"state-{self._session.view.term}", count), count)
        if snapshot is not None:
            snapshot.write(memory.raw(0, count))
        peers.gather(_WRITTEN, b"")
        return Snapshot.read(memory.raw(0, count)) if newcomer else None
