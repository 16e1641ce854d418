"""The register of rounds at a server: when one is over, by this server's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from paceline.servers.clocks import Async
from paceline.servers.messages import Asking, Begin, Centre, Done, Ongoing, Turn, Turned
from paceline.servers.registry import Answer, Registry
from paceline.servers.rounds import Rounds


class RoundRegistry(Registry):
    _kind = Rounds

    def __init__(self, centre: Centre, since: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Async(), 1, since)
        self._centre, self._now = centre, now
        self._reached: tuple[int, float] = (-1, 0.0)
        """In which round a quorum was there, and since when as this server knows: after a failover the window begins anew."""

    def _consider(self, register: Any, call: Asking, body: memoryview) -> Answer | None:
        match call:
            case Ongoing(stretch):
                if stretch == register.stretch and register.keeper < 0:
                    self._close(register)  # else nobody would look at the clock while all have a client in hand
                return Done(register.stretch == stretch and not register.over), ()
            case Begin(worker, stretch, members=members, here=here):
                answer = super()._consider(register, call, body)
                if stretch == register.stretch:
                    register.members = sorted({*register.members, *members})
                    register.here.pop(worker, None)
                    if here is not None:
                        register.here[worker] = here
                return answer
        return super()._consider(register, call, body)

    def _turn(self, register: Any, turn: Turn) -> Answer | None:
        if register.keeper not in (-1, turn.worker):
            return None  # nothing arrives, and no round ends, while everything is held
        register.scheduled |= turn.scheduled
        if turn.stretch == register.stretch:
            self._close(register)  # what comes behind the window is late, whoever looks first
            register.finish(turn.worker, turn.delivered)
            self._close(register)
        answer = super()._turn(register, replace(turn, delivered=[]))
        if answer is not None and isinstance(answer[0], Turned) and not answer[0].numbers:
            answer[0].closed, answer[0].scheduled = register.closed, register.scheduled
        return answer

    def _close(self, rounds: Rounds) -> None:
        quorum, now = self._centre.quorum, self._now()
        if rounds.reached >= quorum and self._reached[0] != rounds.stretch:
            self._reached = rounds.stretch, now
        waited = now - self._reached[1] if self._reached[0] == rounds.stretch else 0.0
        if rounds.due(quorum, self._centre.grace_s, waited):
            rounds.close(quorum)
