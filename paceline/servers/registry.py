"""The register at a server: what is asked of it, as a primary and as a backup.

It is held as a fragment is. A primary makes its next state on a copy, has the backups told of all of it, and then goes over
to it: it is a few kilobytes. Who has to wait is told again whenever it has changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.servers.clocks import Clocks, Decision, Mode
from paceline.servers.messages import (
    Asking,
    Begin,
    Begun,
    Done,
    Enter,
    Had,
    Hold,
    Lay,
    Lost,
    Noted,
    Notes,
    Number,
    Push,
    Tail,
    Turn,
    Turned,
    Unheard,
)
from paceline.servers.register import Register

Answer = tuple[msgspec.Struct, Sequence[memoryview]]


@dataclass
class Waits:
    """Seconds of one wait, by whom it was for: that may change while it lasts.

    >>> waits = Waits()
    >>> for slowest, now in ((2, 10.0), (2, 10.5), (1, 11.5), (None, 12.0)):
    ...     waits.go_on(slowest, now)
    >>> waits.end(13.0)
    {2: 1.5, 1: 0.5}
    """

    since: float = 0.0
    slowest: int | None = None
    seconds: dict[int, float] = field(default_factory=dict)

    def go_on(self, slowest: int | None, now: float) -> None:
        if self.slowest is not None:
            self.seconds[self.slowest] = self.seconds.get(self.slowest, 0.0) + now - self.since
        self.since, self.slowest = now, slowest

    def end(self, now: float) -> dict[int, float]:
        self.go_on(None, now)
        return self.seconds


class Registry:
    """`since` which layout this server holds it. All methods are called under `changed`."""

    _kind: type[Register] = Register

    def __init__(self, mode: Mode, slots: int, since: int) -> None:
        self.since = since
        self.changed = threading.Condition(threading.RLock())
        self.version = 0
        self._register = self._kind(slots)
        self._clocks = Clocks(mode, self._register.clocks)
        self._notes: tuple[int, bytes] | None = None
        """Of which stretch, and what."""
        self._waits: dict[int, Waits] = {}
        """Of each worker that waits for its turn."""

    # as any copy

    def knows(self, message: Lay | Noted | Notes, body: memoryview) -> bool:
        match message:
            case Lay():
                return self.version > 0
            case Noted(version):
                return version <= self.version
            case Notes(stretch):
                return self._notes is not None and stretch <= self._notes[0]

    def do(self, message: Lay | Noted | Notes, body: memoryview) -> None:
        match message:
            case Lay():
                self._become(self._kind.decode(body) if len(body) else self._register, 1)
            case Noted(version):
                self._become(self._kind.decode(body), version)
            case Notes(stretch):
                self._notes = stretch, bytes(body)
        self.changed.notify_all()

    def all_said(self) -> Iterator[tuple[Noted | Notes, list[memoryview]]]:
        yield Noted(self.version), [memoryview(self._register.encode())]
        if self._notes is not None:
            yield Notes(self._notes[0]), [memoryview(self._notes[1])]

    def _become(self, register: Register, version: int) -> None:
        self._register, self._clocks.kept, self.version = register, register.clocks, version

    # as a primary

    def draft(self, call: Asking, body: memoryview) -> tuple[Answer | None, bytes]:
        """What is answered, if anything is yet; and the next state, encoded, if there is one: it holds once it is `do`ne."""
        if not self.version and isinstance(call, Lost | Had):
            # It has not been laid yet: whoever is dead is told of again, and what is laid must be the first of it.
            return ((Done(), ()) if isinstance(call, Lost) else None), b""
        before = self._register.encode()
        register = self._kind.decode(before)
        self._clocks.kept = register.clocks
        answer = self._consider(register, call, body)
        self._clocks.kept = self._register.clocks
        after = register.encode()
        return answer, b"" if after == before else after

    def _consider(self, register: Any, call: Asking, body: memoryview) -> Answer | None:
        match call:
            case Begin(worker, stretch, total, epoch, loader, last=last):
                register.begin(stretch, total, epoch, loader, last)
                register.enter(worker)
                noted = self._notes is not None and self._notes[0] >= stretch
                return Begun(register.first, register.trainers, noted), ()
            case Enter(worker):
                return self._enter(register, worker)
            case Turn():
                return self._turn(register, call)
            case Push(worker, own, number, step, heard):
                register.heard(heard)
                if register.keeper not in (-1, worker):
                    return None
                return Number(register.push(worker, own, number, step, bytes(body))), ()
            case Lost(workers):
                for worker in workers:
                    register.lose(worker)
                    self._clocks.leave(worker)
                return Done(), ()
            case Had(worker, own):
                register.lose(worker)
                self._clocks.leave(worker)
                return Done(register.counted(worker, own)), ()
            case Unheard(after):
                return Tail([entry for entry in register.log if entry.count > after], register.count), ()
            case Hold(worker, yes):
                return self._hold(register, worker, yes)
            case Notes():
                return Done(), ()
        return None

    def _enter(self, register: Register, worker: int) -> Answer | None:
        if self._notes is None or self._notes[0] != register.stretch or register.over:
            return None
        register.enter(worker)
        return Done(), (memoryview(self._notes[1]),)

    def _turn(self, register: Register, turn: Turn) -> Answer | None:
        worker, now = turn.worker, time.monotonic()
        if turn.stretch == register.stretch:
            register.finish(worker, turn.delivered)
        if turn.stop and not register.stop:
            register.stop, register.stopper = turn.stop, worker
        register.written(turn.written)
        if turn.leaves and worker not in register.left:
            register.left = [*register.left, worker]
        if register.stop or turn.leaves:
            register.give_back(worker)
        numbers = [] if turn.leaves else register.lease(worker, turn.want)
        if turn.delivered or not numbers:
            self._clocks.end(worker, now)
        if turn.leaves or turn.stretch < register.stretch or register.over or worker in register.gone:
            numbers = []
        elif not (decision := self._may_begin(register, worker, numbers, now)).go:
            self._waits.setdefault(worker, Waits()).go_on(decision.waits_for, now)
            return None
        turned = Turned(
            list(numbers), register.count, register.steps, register.samples, register.trainers, register.gone, [],
            register.stop, register.stopper, {} if numbers else register.clocks.staleness,
        )  # fmt: skip
        if turn.written >= 0:
            turned.receipts = register.receipts
        if worker in self._waits:
            turned.waited = self._waits.pop(worker).end(now)
        return turned, ()

    def _may_begin(self, register: Register, worker: int, numbers: Sequence[int], now: float) -> Decision:
        if numbers:
            return self._clocks.begin(worker, register.step_of(numbers[0]), now)
        clocks = register.clocks.clocks
        slowest = min(clocks, key=lambda other: (clocks[other], other), default=None)
        return Decision(False, "what is left of the stretch is in others' hands", slowest)

    def _hold(self, register: Register, worker: int, yes: bool) -> Answer | None:
        if yes and register.keeper not in (-1, worker):
            return None
        if yes:
            register.keeper = worker
        elif register.keeper == worker:
            register.keeper = -1
        return Number(register.count), (memoryview(register.encode()),)
