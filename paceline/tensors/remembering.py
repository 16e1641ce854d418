"""Groups whose members may be one meeting apart when a worker dies, and how they come together again.

Between machines a dying worker may have sent its part to one and not to another. The one completes the
meeting and goes on through its script, the other learns in it that the term has ended. Never more than one:
a meeting completes only once every member has entered it. So each keeps what came of its last meeting, and
the first thing the members of a new group do is to say how far they are (`Past.sync`):

    who has not completed the newest meeting is sent what came of it, and its call returns as if it had met;
    if somebody has opened the reduce point behind it, all open it as that one did (`Ended`): its shares are
    computed already, dealt by the plan of the term it was opened in. Then it is carried on by those who remain.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Memory, Parts, Peers, TermEnded, Trading
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import Plan
from paceline.wires.view import View

_SYNC, _SHIP = 211, 212
_PLACE = struct.Struct("<qqq")
_NOBODY = View(0, ())
NEW = -(1 << 62)
"""Meetings that a newcomer has completed, until it is told how many the others have."""


@dataclass
class Met:
    """What came of a meeting."""

    key: int = 0
    view: View = _NOBODY
    """Who has met."""
    plan: Plan | None = None
    """By which they had shares, if it was a reduce point."""
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    flats: list[torch.Tensor] = field(default_factory=list)
    """The point's total."""
    payloads: list[bytes] = field(default_factory=list)
    """What everybody said, if it was a gather."""

    def pack(self) -> bytearray:
        plan = [self.plan.leaves, self.plan.ranges] if self.plan is not None else None
        view = [self.view.term, self.view.members]
        tree = [self.key, view, plan, torch.tensor(self.rows), self.flats, self.payloads]
        return Snapshot(tree).packed()

    @staticmethod
    def unpack(raw: memoryview, device: torch.device) -> Met:
        key, view, plan, rows, flats, payloads = Snapshot.read(raw).tree
        flats = [flat.to(device) for flat in flats]
        return Met(key, View(*view), Plan(*plan) if plan else None, rows.numpy(), flats, payloads)


class OutrunError(Exception):
    """The others are further than one meeting, in this term. That is so only if they have gone on without this
    worker, which was to leave and had not learned that all agree: a death has brought it among them once more."""

    def __init__(self, text: str, term: int) -> None:
        super().__init__(text)
        self.term = term


class Past:
    """What this worker has met, in all groups so far."""

    def __init__(self) -> None:
        self.completed = 0
        """Meetings that it has completed, from the run's start on; NEW for a newcomer that comes in where the others are."""
        self.opened = 0
        """The term in which it has opened the reduce point that comes next; 0: it has not."""
        self.last = Met()
        self._memory: list[torch.Tensor] = []
        self.before: Callable[[], None] = lambda: None
        """Called before each meeting: it may wait."""
        self.after: Callable[[Met], None] = lambda met: None
        """Called when one is completed."""

    def open(self, term: int) -> None:
        """A point is opened; or carried on, by the plan of the term in which it was."""
        self.opened = self.opened or term

    def reduced(self, met: Met) -> None:
        """A reduce point. The script may change its gradients in place, so they are copied: one pass over memory
        for what has just crossed a network."""
        flats = met.flats
        if [(flat.shape, flat.dtype) for flat in flats] != [(flat.shape, flat.dtype) for flat in self._memory]:
            self._memory = [torch.empty_like(flat) for flat in flats]
        for kept, flat in zip(self._memory, flats, strict=True):
            kept.copy_(flat)
        met.flats = self._memory
        self.complete(met)

    def complete(self, met: Met) -> None:
        self.completed, self.opened, self.last = self.completed + 1, 0, met
        self.after(met)

    # with the others

    def sync(self, peers: Peers, term: int) -> int:
        """The first thing that all do in a group: come to the same meeting. `term`: the one this worker was in.

        Returns the term by whose plan the next point has been opened by some; 0: by nobody. A death in here is
        no harm: it all happens again in the next group.
        """
        said = [_PLACE.unpack(raw) for raw in peers.gather(_SYNC, _PLACE.pack(self.completed, self.opened, term))]
        newest = max(completed for completed, _, _ in said)
        if self.completed == NEW:
            self.completed = newest
        ahead = [rank for rank, (completed, _, _) in enumerate(said) if completed == newest]
        if any(completed == newest - 1 for completed, _, _ in said):
            shipped = peers.gather(_SHIP, bytes(self.last.pack()) if peers.rank == ahead[0] else b"")[ahead[0]]
            if self.completed == newest - 1:
                self.complete(Met.unpack(memoryview(shipped), peers.device))
        if self.completed < newest:
            raise OutrunError(f"workers are more than one meeting apart: {said}", max(said[rank][2] for rank in ahead))
        terms = {said[rank][1] for rank in ahead} - {0}
        assert len(terms) < 2, f"workers have opened one reduce point in different terms: {said}"
        return terms.pop() if terms else 0


class Remembering:
    """A group, with its outcomes remembered. When it ends, `ended` brings the members together in the next one and
    says whether that has completed the meeting in hand; if not, `TermEnded` goes on to whoever called."""

    ends_together = False

    def __init__(self, peers: Peers, view: View, past: Past, ended: Callable[[], bool]) -> None:
        self._peers, self._view, self._past, self._ended = peers, view, past, ended
        self.rank, self.size, self.device, self.reads_late = peers.rank, peers.size, peers.device, peers.reads_late
        self._opened: Peers = peers
        """Whose memory the parts of the point in hand are in."""
        self._met = Met()
        """What comes of the point in hand."""
        self._over = False
        self._lost: TermEnded | None = None
        """A bucket could not leave: that is told where all meet, not in the middle of a backward."""

    @property
    def waited_s(self) -> float:
        return self._peers.waited_s

    @property
    def sent_bytes(self) -> int:
        return self._peers.sent_bytes

    def _in_term(self) -> None:
        if self._over:
            raise TermEnded("this term has ended")

    def _end(self, ended: TermEnded) -> None:
        """Returns if the meeting in hand is completed all the same."""
        self._over = True
        if not self._ended():
            raise ended

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._in_term()
        self._lost, self._opened = None, self._peers
        try:
            self._peers.open(plan, layout, lanes)
        except TermEnded as ended:
            # A flat loop has computed its share by this term's plan already: so the point is opened in it all the same.
            self._lost = ended
            self._opened = Ended(self.rank, self.size, self.device, self._view.term, self._past)
            self._opened.open(plan, layout, lanes)
        self._past.open(self._view.term)
        self._met = Met(0, self._view, plan)

    def parts(self) -> Parts:
        return self._opened.parts()

    def post(self, bucket: int) -> None:
        if self._lost is None:
            try:
                self._peers.post(bucket)
            except TermEnded as ended:
                self._lost = ended

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        self._in_term()
        self._past.before()
        try:
            if self._lost is not None:
                raise self._lost
            self._met.key, self._met.rows = key, self._peers.exchange(key, lanes)
        except TermEnded as ended:
            self._end(ended)
            return self._past.last.rows
        return self._met.rows

    def repost(self, buckets: Sequence[int]) -> None:
        if self._over:
            return  # the total is here already
        try:
            self._peers.repost(buckets)
        except TermEnded as ended:
            self._end(ended)

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        if not self._over:
            try:
                flats = self._met.flats = self._peers.total(call, divisor)
                self._past.reduced(self._met)
                return flats
            except TermEnded as ended:
                self._end(ended)
        return [flat.clone() for flat in self._past.last.flats]

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self._in_term()
        self._past.before()
        try:
            payloads = self._peers.gather(key, payload)
        except TermEnded as ended:
            self._end(ended)
            return self._past.last.payloads
        self._past.complete(Met(key, self._view, payloads=payloads))
        return payloads

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        """Not remembered: what came of it is another thing for each. Who needs it to be over for all, lets them meet."""
        self._in_term()
        self._past.before()
        assert isinstance(self._peers, Trading)
        return self._peers.trade(key, partner, payload)

    def close(self) -> None:
        self._peers.close()


class Ended:
    """A group of a term that has ended, for a worker that has yet to open a point which others opened in it."""

    ends_together, reads_late, waited_s, sent_bytes = False, True, 0.0, 0

    def __init__(self, rank: int, size: int, device: torch.device, term: int, past: Past) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._term, self._past = term, past
        self._memory, self._plan = Memory(device), Plan.of(1, 1)

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._plan = plan
        self._memory.open(layout)
        self._past.open(self._term)

    def parts(self) -> Parts:
        return [self._memory.of(number) for number in range(len(self._plan.parts(self.rank)))]

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        raise TermEnded("this term has ended")

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        raise TermEnded("this term has ended")

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        raise TermEnded("this term has ended")

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        raise TermEnded("this term has ended")

    def close(self) -> None:
        return
