"""A worker's way through the terms of its run: the group of peers it is in now, and the next.

A term ends for a worker in one of two ways. A peer is gone: `TermEnded` comes out of a wait, and whoever
was waiting calls `next` and tries again with those who remain. Or all let a newcomer in, and the first of
the old members hands it the run's state: at the end of a step that they agree on (`boundary`), or, where
they cannot go on with fewer, at the place where they all are (`refill`). On several machines nothing is left to
be handed over: the newcomer has got the state while they trained, and has come behind them (`healing`). Unless the
parameters are at servers, or all wait for it: then it is handed over as on one machine.

Where a group does not end together (`Peers.ends_together`), those who remain may be one meeting apart. In a run
that has such groups every one begins with a word from all on how far they are, and
who is behind gets what it missed (`tensors.remembering`): inside the wait that ended, so that its script sees
nothing of it. The new group is then ready, and is entered at the same place by all: where they meet next; or
behind the opening of the next reduce point, if somebody has opened it in the term before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.data.order import mix
from paceline.errors import OvertakenError, PeerLostError
from paceline.tensors.following import Following
from paceline.tensors.peers import Alone, Peers, TermEnded, Trading
from paceline.tensors.remembering import NEW, Ended, OutrunError, Past, Remembering
from paceline.tensors.segment import Segment
from paceline.tensors.snapshot import Snapshot
from paceline.wires.view import View
from paceline.worker import waiting
from paceline.worker.healing import Donor, Inlet, Stateful, receive_state
from paceline.worker.session import Session

_STATE, _WRITTEN, _REUNION, _ENTERED, _SEEN = mix(201), mix(202), mix(204), mix(208), mix(214)
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Recovery:
    """When, on the monotonic clock, a loss was noticed, its view known, and the new group built."""

    noticed: float
    agreed: float
    rebuilt: float

    def words(self, now: float) -> str:
        agreed, rebuilt, met = (f"{(at - self.noticed) * 1e3:.0f} ms" for at in (self.agreed, self.rebuilt, now))
        return f"agreed {agreed}, rebuilt {rebuilt}, gradients met {met}"


@dataclass
class _Ready:
    """The next view and its group, whose members have all come to the same meeting."""

    view: View
    group: Peers
    opened: int
    """The term in which some have opened the next reduce point, until this worker has come to that; 0: none."""
    recovery: _Recovery


class Terms:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._peers: Peers | None = None
        self.on_peers: list[Callable[[Peers], None]] = []
        """Told whenever the group is another one."""
        self._past = Past()
        self._ready: _Ready | None = None
        self._joining = False
        self._recovery: _Recovery | None = None
        self._donor: Donor | None = None
        """Where newcomers heal while the others train."""
        if not session.hands_over:
            self._donor = Donor(self._past)
            session.on_newcomer(self._donor.called)
        self._inlet: Inlet | None = None
        """A newcomer's line from its own donor, until it is let in."""
        self._near = False
        """It has told that it could be."""
        self.flat: Callable[[], bool] = lambda: False
        """Whether the script's loop is known to have no run.slots(): then nobody trains while a worker is missing, and there
        is nobody to follow."""
        self.catching_up = False
        """A newcomer that has not come to its first batch: what it meets before, the others have met already."""

    @property
    def peers(self) -> Peers:
        """Built when first needed: worker 0 comes to it long before the others, who wait in init() until
        it has reached prepare()."""
        if self._peers is None:
            self._session.board.main_ready = True
            try:
                self._peers = self._build()
            except TermEnded:
                self.next()
        assert self._peers is not None
        return self._peers

    @property
    def following(self) -> bool:
        """A newcomer that goes through its script behind another worker: what it would bring, nobody waits for."""
        return self._inlet is not None and not self.catching_up

    @property
    def meeting(self) -> Peers:
        """With whom to evaluate: a newcomer that catches up does so alone."""
        if self.catching_up or (self._session.joining and self._inlet is None):
            return Alone(self._session.device)
        return self.next() if self._ready is not None else self.peers

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

    # a peer is gone

    def next(self) -> Peers:
        """A peer is gone: go on with those who remain."""
        if self._inlet is not None:
            return self.peers  # which follow them
        ready = self._ready or self._settle()
        if ready.opened and not self._past.opened:
            term, ready.opened = ready.opened, 0
            if term != self._session.view.term:
                self._session.enter(term)  # an agreed one, that this worker would have come to; or has left in
            return self._with(Ended(self._session.rank, self._session.workers, ready.group.device, term, self._past))
        self._ready, self._session.view = None, ready.view
        first = self._recovery or ready.recovery
        self._recovery = _Recovery(first.noticed, ready.recovery.agreed, ready.recovery.rebuilt)
        return self._with(self._remembered(ready.group))

    def _settle(self) -> _Ready:
        """Find the next view whose members all come to the same meeting. It is not entered yet: what is in hand may
        have been completed by that, among the members of the last one."""
        noticed, before = time.monotonic(), self._session.view
        while True:
            view = self._session.next_view()
            agreed = time.monotonic()
            try:
                group = self._session.peers()
                opened = self._sync(group, before.term)
                break
            except TermEnded:
                continue
            except OutrunError as outrun:
                self._session.enter(outrun.term)  # a worker that is not in it leaves the run
                raise
        self._ready = _Ready(view, group, opened, _Recovery(noticed, agreed, time.monotonic()))
        self._session.view = before
        return self._ready

    def _missed(self) -> bool:
        """A wait of the group has ended with its term; whether its meeting is completed, by somebody who had."""
        completed = self._past.completed
        self._settle()
        return self._past.completed > completed

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

    # groups

    def _build(self, in_hand: bool = False) -> Peers:
        """The group of the session's view, its members at the same meeting; some may have a point in hand, where all wait."""
        group = self._session.peers()
        opened = self._sync(group, self._session.view.term)
        assert in_hand or not opened, f"an agreed term begins, and a reduce point was opened in term {opened}"
        return self._remembered(group)

    def _ends_apart(self, group: Peers) -> bool:
        """Asked of the run too: one machine's group may follow that of several, and all must agree on what is said in it."""
        return (self._session.ends_apart and not self._session.joining) or not group.ends_together

    def _sync(self, group: Peers, term: int) -> int:
        return self._past.sync(group, term) if self._ends_apart(group) else 0

    def _remembered(self, group: Peers) -> Peers:
        if not self._ends_apart(group):
            return group
        return Remembering(group, self._session.view, self._past, self._missed)

    def _with(self, peers: Peers) -> Peers:
        self._peers = peers
        for tell in self.on_peers:
            tell(peers)
        return peers

    # newcomers

    def boundary(self, agreed: int, state: Stateful, gives_state: bool = True) -> None:
        """A step is over. Enter the term that all have agreed on, if it is a new one. `gives_state`: whether who heals may begin
        with the state of right now."""
        if self._inlet is not None:
            self._come_closer(self._inlet, agreed)
            return
        self.enter_ready()
        waved = self._donor is not None and self.flat()
        if agreed > self._session.view.term:
            self._change(agreed, state, hands_over=waved)  # who was waved in has come for the state
        if self._donor is not None and waved:
            self._donor.wave_in()
        elif self._donor is not None and gives_state:
            self._donor.at_boundary(self._session.view, state)

    def reunite(self, trainers: list[int], parted: Callable[[list[int]], None], state: Stateful) -> None:
        """Workers that run at their own pace are all at one place: enter what was announced meanwhile, and let those in who
        have trained with them. Who leaves by that has trained too, and is no guest: `parted` is told."""
        there = trainers

        def word() -> bytes:
            guests = waiting.for_guests(self._session, there)
            return self._session.next_term.to_bytes(8, "little") + bytes([guests])

        while True:
            words = self.gather(_REUNION, word)
            agreed = min(int.from_bytes(said[:8], "little") for said in words)
            if agreed > self._session.view.term:
                before = self._session.view.members
                self._change(agreed, state)
                if left := [member for member in before if member not in self._session.view.members]:
                    there = [worker for worker in there if worker not in left]
                    parted(left)
            elif not any(said[8] for said in words):
                return

    def refill(self, size: int, state: Stateful | None) -> None:
        """Wait until there are `size` workers. Whoever comes gets the state of right now, if it needs one: all are at this
        place. Without one they begin here anew, and no point that some have opened is carried on."""
        if state is None:
            self.begin_anew()
        if self._inlet is not None:
            raise OvertakenError(
                "a loop without run.slots() has begun, in which nobody follows: another worker will be started"
            )
        if self._donor is not None and state is not None:
            self._donor.wave_in()
        while True:
            self.enter_ready()
            if self.peers.size >= size:
                return
            try:
                term = self._session.announced(size)
                if state is not None:
                    self.peers.gather(_SEEN, b"")  # who leaves by that must not be gone before all have seen it
                self._change(term, state, hands_over=state is not None)
            except TermEnded:
                self.next()

    def enter_ready(self) -> None:
        """A meeting of a term that has ended was completed all the same: where all meet next, this worker enters the next one.
        Unless it is about to open a point as others have in the old one."""
        if self._ready is not None and not isinstance(self._peers, Ended):
            self.next()

    def begin_anew(self) -> None:
        """No point that some have opened is carried on."""
        self._past.opened = 0

    def enter(self, term: int) -> None:
        """All have agreed, at the place where they are, to enter this term; whoever comes has its state already."""
        self._change(term, None)

    def _change(self, term: int, state: Stateful | None, hands_over: bool = False) -> None:
        """Enter an announced view, as all others do here. Whoever comes is handed the state, unless it has got it already."""
        before = self._session.view.members
        members = self._session.enter(term).members
        try:
            peers = self._with(self._build(in_hand=hands_over))
            if all(member in before for member in members):
                return
            if state is None:
                peers.gather(_ENTERED, b"")  # then the newcomer may say that it is in
            if state is None or not (hands_over or self._session.hands_over):
                return  # nobody needs anything
            donor = next(rank for rank, member in enumerate(members) if member in before)
            newcomer = next(rank for rank, member in enumerate(members) if member not in before)
            self._hand_over(peers, donor, newcomer, state.capture() if peers.rank == donor else None)
        except TermEnded:
            self.next()

    def join(self, state: Stateful) -> None:
        """A newcomer enters: it gets the run's state before its first batch."""
        if self._session.hands_over:
            self._enter(state)
        else:
            self._follow(state)
        self.catching_up = True

    def come_in(self) -> None:
        """A newcomer that has its state already enters where the others wait for it."""
        self._session.join()
        self._past.completed = NEW
        try:
            self._with(self._build()).gather(_ENTERED, b"")
        except TermEnded as ended:
            raise _overtaken(ended) from None
        self._session.healed()

    def _enter(self, state: Stateful) -> None:
        """At a place where all wait until it has the state."""
        self._session.join()
        self._joining, self._past.completed = True, NEW
        try:
            peers = self._with(self._build(in_hand=True))
            snapshot = self._hand_over(peers, 1 if peers.rank == 0 else 0, peers.rank, None)
        except TermEnded as ended:
            raise _overtaken(ended) from None
        self._joining = False
        assert snapshot is not None
        state.restore(snapshot)
        self._session.healed()

    def _hand_over(self, peers: Peers, donor: int, newcomer: int, snapshot: Snapshot | None) -> Snapshot | None:
        """The donor's state to the newcomer; the others only wait for it. When all have met behind that, all know that it is
        there, and that everybody has come to this place."""
        if self._session.apart:
            assert isinstance(peers, Trading)
            partner = {donor: newcomer, newcomer: donor}.get(peers.rank)
            state = peers.trade(_STATE, partner, bytes(snapshot.packed()) if snapshot else b"")
            peers.gather(_WRITTEN, b"")
            return Snapshot.read(memoryview(state)) if self._joining else None
        size = snapshot.nbytes.to_bytes(8, "little") if snapshot else b""
        size = next(said for said in peers.gather(_STATE, size) if said)
        if snapshot is None and not self._joining:
            peers.gather(_WRITTEN, b"")
            return None
        count = int.from_bytes(size, "little")
        memory = Segment(self._session.segment(f"state-{self._session.view.term}", count), count)
        if snapshot is not None:
            snapshot.write(memory.raw(0, count))
        peers.gather(_WRITTEN, b"")
        return Snapshot.read(memory.raw(0, count)) if self._joining else None

    # newcomers that nobody waits for

    def _follow(self, state: Stateful) -> None:
        """Get the state while the others train, and come behind them; or where they wait for it, if they do."""
        while self._inlet is None:
            inlet = self._session.donor()
            try:
                view = receive_state(inlet, self._past, state)
            except OvertakenError:
                inlet.close()  # nothing is begun yet: another member will do
                continue
            if view is None:
                inlet.close()
                self._enter(state)
                return
            self._session.view, self._inlet = view, inlet

        def told(view: View) -> None:
            self._session.view = view

        self._with(Following(self._past, self._session.device, self._inlet.take, told))

    def _come_closer(self, inlet: Inlet, agreed: int) -> None:
        """A step is over for one who follows: it may be near enough, or all let it in here."""
        if inlet.near and not self._near:
            self._near = True
            self._session.caught_up()
        if agreed <= self._session.view.term or self._session.worker not in self._session.enter(agreed).members:
            return
        inlet.close()
        self._inlet = None
        try:
            self._with(self._build())
        except TermEnded as ended:
            raise OvertakenError(f"{ended}: this join was overtaken, and another worker will be started") from None
        self._session.healed()

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._donor is not None:
            self._donor.close()
        if self._inlet is not None:
            self._inlet.close()


def _overtaken(ended: TermEnded) -> PeerLostError:
    return PeerLostError(f"{ended}: this join was overtaken, and another worker will be started")
