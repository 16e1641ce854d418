"""The agent of a machine whose run is led elsewhere: it does what the journal says, and reports. No torch in here.

If the one that leads is silent for a lease it is looked for: its standby, or where the store says that
another machine leads now. With a store that all machines reach, this agent may lead next. Meanwhile the
workers train on, as far as they get.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paceline.cluster import between
from paceline.cluster.crew import NurseryError
from paceline.cluster.journal import End, Journal
from paceline.cluster.node import GRACE_S, TICK_S, Node
from paceline.cluster.reception import NotNow
from paceline.cluster.seeking import Found, Gone, Seeker, Vacant
from paceline.cluster.store import Record
from paceline.wires import messages, wire
from paceline.wires.connection import Connection


@dataclass(frozen=True)
class Ended:
    """The run is over for this machine."""

    exit_code: int


@dataclass(frozen=True)
class MayLead:
    """Nobody leads: this agent may try."""

    record: Record


class Follower:
    """`note_down` keeps the last journal for this machine's next agent."""

    def __init__(
        self,
        node: Node,
        note_down: Callable[[bytes], None],
        journal: Journal,
        seeker: Seeker,
        identity: str,
    ) -> None:
        self._node, self._note_down, self._journal, self._seeker = node, note_down, journal, seeker
        self._identity = identity
        """The machine's own."""
        self._fence = 0
        self._leader: Connection | None = None
        self._heard = time.monotonic()
        self._asked: dict[int, Connection] = {}
        self._questions = 0
        self._changed = False
        self._failed_at: float | None = None
        self._looked_at = 0.0
        self._outcome: Ended | MayLead | None = None

    @property
    def journal(self) -> Journal:
        return self._journal

    def serve(self) -> Ended | MayLead:
        """Until the run ends, or this agent may lead it."""
        node = self._node
        node.selector.register(self._seeker, 1, lambda _: self._found())
        try:
            node.begin(self)
            self._seeker.seek()
            while self._outcome is None:
                self._turn()
            if isinstance(self._outcome, Ended):
                node.crew.kill_all()
                node.leave(self._outcome.exit_code)
            return self._outcome
        finally:
            node.selector.unregister(self._seeker)
            self._lose_leader()
            self._seeker.close()

    def _turn(self) -> None:
        try:
            now = self._node.turn(TICK_S)
        except NurseryError as error:
            self._tell(messages.Failed(str(error), self._node.log_tail("nursery"), 1, follows=False))
            self._outcome = Ended(1)
            return
        if now - self._looked_at >= TICK_S:
            self._looked_at, self._changed = now, True
            self._look_around(now)
        if self._changed:
            self._report()

    def _look_around(self, now: float) -> None:
        self._node.look_around(now)
        if self._leader is not None and (self._leader.ended or now - self._heard > self._node.job.settings.lease):
            self._lose_leader()
            self._seeker.seek()
        if self._leader is not None:
            self._leader.flush()
        elif now - self._heard > self._node.job.settings.grace and not self._node.crew.numbers:
            self._node.folder.event("over", "no coordinator was found again", machine=self._node.number)
            self._outcome = Ended(1)
        if self._node.told_to_go:
            self._go()
        if self._journal.failure is not None or self._journal.killed:
            self._failed_at = self._failed_at or now
            if now - self._failed_at > GRACE_S:
                self._node.crew.kill_all()

    def _go(self) -> None:
        """Its workers leave at a step's end, and then this machine does."""
        self._node.send_workers_off()
        if not self._node.crew.numbers and all(number in self._journal.exits for number in self._node.exits):
            self._outcome = Ended(0)

    # the one that leads

    def _found(self) -> None:
        match self._seeker.found():
            case Found(sock):
                self._leader = Connection(sock, between.FROM_LEADER, "the coordinator")
                self._heard = time.monotonic()
                self._node.selector.register(self._leader, 1, lambda _: self._hear())
                self._leader.send(between.Join(self._identity, self._node.told_to_go))
                self._changed = True
            case Vacant(record):
                self._outcome = MayLead(record)
            case Gone():
                self._outcome = Ended(1 if self._journal.exit_code is None else self._journal.exit_code)

    def _hear(self) -> None:
        leader = self._leader
        assert leader is not None
        for message, _ in leader.receive():
            self._heard = time.monotonic()
            self._node.board.led()
            self._take(message)
            if self._leader is not leader:
                return  # it was one of the past

    def _take(self, message: msgspec.Struct) -> None:
        match message:
            case between.Told(fence, _) if fence < self._fence:
                self._lose_leader()  # one of the past, that has not noticed yet
                self._seeker.seek()
            case between.Told(fence, raw) if raw:
                self._fence = fence
                self._note_down(raw)
                self._journal = Journal.decode(raw)
                if self._journal.exit_code is None:
                    self._node.follow()
                else:
                    self._lose_leader()  # at once: it waits for that
                    self._outcome = Ended(self._journal.exit_code)
            case between.Reply(number, raw):
                peer = self._asked.pop(number, None)
                if peer is not None:
                    peer.send(wire.decode(raw, messages.ANY))
            case between.Hit(worker, signum):
                self._node.crew.signal(worker, signum)
            case between.TurnedAway(why):
                self._node.folder.event("over", why, machine=self._node.number)
                self._outcome = Ended(1)

    def _lose_leader(self) -> None:
        """Whoever has asked something asks the next one."""
        if self._leader is not None:
            self._node.selector.unregister(self._leader)
            self._leader.close()
            self._leader = None
        for peer in self._asked.values():
            self._node.desk.drop(peer)
        self._asked = {}

    def _report(self) -> None:
        self._changed = False
        if self._leader is None:
            return
        node, crew = self._node, self._node.crew
        ended = {number: end for number, end in node.exits.items() if number not in self._journal.exits}
        self._leader.send(
            between.Report(
                crew.pids,
                ended,
                [number for number in crew.numbers if node.board.leaves(number)],
                node.told_to_go,
                node.board.main_ready,
                {number: node.board.row_bytes(number) for number in (*crew.numbers, *ended)},
            )
        )

    # what happens on this machine: see node.Master

    def worker_started(self, number: int, pid: int) -> None:
        self._changed = True

    def worker_ended(self, number: int, end: End) -> None:
        self._changed = True

    def worker_leaves(self, number: int) -> None:
        return  # every report says so

    def evict(self, number: int, why: str) -> None:
        self._node.crew.kill(number)

    def decide(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        if self._leader is None:
            raise NotNow
        self._questions += 1
        self._asked[self._questions] = peer
        self._tell(message, worker)

    def _tell(self, message: msgspec.Struct, worker: int = -1) -> None:
        if self._leader is not None:
            raw = msgspec.Raw(msgspec.msgpack.encode(message))
            self._leader.send(between.Ask(self._questions, worker, raw))
