"""Where a run goes back to in which each worker keeps something that nobody else has: what a codec leaves out, on several machines.

At each checkpoint all workers get all of it (`Lasting.collect`), and on every machine one of them leaves the whole state in memory that
outlives its processes. After a death all begin again from the newest such state on any machine, which the others are sent. So any
machine may be lost, with its disk and a checkpoint that was being written; the files are for when all are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from paceline.data.order import mix
from paceline.errors import ResourceError
from paceline.state.buddies import NONE
from paceline.state.checkpoint import step_of
from paceline.state.lockers import Locker
from paceline.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.terms import Terms

_FOUND, _SENT = mix(205), mix(209)


class Refuge:
    """This machine's. Who of its workers gets hold of it first leaves the state there, until its end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False

    @cached_property
    def _locker(self) -> Locker | None:
        session = self._session
        return Locker(0, session.segment) if session.apart and not session.dry_run else None

    def leave(self, step: int, state: Callable[[], Snapshot]) -> None:
        """Until it is whole, the one before stands."""
        if self._locker is None or not self._locker.claim():
            return
        try:
            self._locker.put(step, state())
        except ResourceError as error:
            if not self._told:
                self._told = True
                sys.stderr.write(
                    f"paceline: this machine's memory has no copy of the run's state ({error}): if the others have none either, a "
                    "death takes the run back to its newest checkpoint on disk\n"
                )

    def newest(self, terms: Terms, written: Callable[[], str]) -> tuple[str, bytes]:
        """What all go back to: a checkpoint by its name, of which main knows (`written`), or the state itself, if that is not
        older; or neither. Nobody trains meanwhile."""
        while True:
            everyone = terms.gather(_FOUND, lambda: self._step.to_bytes(8, "little", signed=True) + written().encode())
            steps = [int.from_bytes(said[:8], "little", signed=True) for said in everyone]
            name, newest = everyone[0][8:].decode(), max(steps)
            if newest == NONE or newest < (step_of(name) if name else 0):
                return name, b""
            sends = terms.peers.rank == steps.index(newest)
            sent = terms.gather(_SENT, partial(self._lying, sends))
            if any(sent):  # else who had it is gone
                return name, max(sent, key=len)

    @property
    def _step(self) -> int:
        return NONE if self._locker is None or self._locker.empty else self._locker.rounds

    def _lying(self, wanted: bool) -> bytes:
        assert self._locker is not None
        return bytes(self._locker.look()) if wanted else b""
