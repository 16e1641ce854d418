"""Where a run goes back to in which each worker keeps something that nobody else has: what a codec leaves out, on several machines.

At each checkpoint all workers get all of it (`Lasting.collect`), and on every machine one of them leaves the whole state in memory that
outlives its processes. After a death all begin again from the newest such state; machines that have an older one, or none, are sent it.
So any machine may be lost, with its disk and a checkpoint that was being written; the files are for when all are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from paceline.data.order import mix
from paceline.errors import ResourceError
from paceline.state.buddies import NONE
from paceline.state.lockers import Locker
from paceline.tensors.snapshot import Snapshot
from paceline.wires.telling import tell

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.terms import Terms

_FOUND, _WRITTEN, _SENT = mix(205), mix(217), mix(218)
_WHERE = struct.Struct("<qq")
"""The step of what lies here, and this worker's number: a rank changes when somebody is lost meanwhile."""


class Refuge:
    """This machine's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False

    @cached_property
    def _locker(self) -> Locker | None:
        session = self._session
        return Locker(0, session.segment) if session.apart and not session.dry_run else None

    def claim(self) -> bool:
        """Whether it is this worker that leaves the state here: who gets hold of it first, until its end."""
        try:
            return self._locker is not None and self._locker.claim()
        except ResourceError as error:
            self._tell(error)
            return False

    def leave(self, step: int, state: Snapshot) -> None:
        """Until it is whole, the one before stands."""
        assert self._locker is not None
        try:
            self._locker.put(step, state)
        except ResourceError as error:
            self._tell(error)

    def _tell(self, error: ResourceError) -> None:
        if not self._told:
            self._told = True
            tell(
                f"no copy of the run's state at step {max(self._step, 0)} or later fits into this machine's memory "
                f"({error}): if the others have none either, a death takes the run further back, or to its newest checkpoint on disk"
            )

    def newest(self, terms: Terms, written: Callable[[int], str]) -> tuple[str, memoryview]:
        """What all go back to: a checkpoint by its name, if main finds one on disk that is newer than any state in memory
        (`written(step)`), or such a state; or neither. Nobody trains meanwhile."""
        while True:
            everyone = terms.gather(_FOUND, lambda: _WHERE.pack(self._step, self._session.worker))
            found: list[tuple[int, int]] = [_WHERE.unpack(said) for said in everyone]
            newest, owner = max(found)
            name = terms.gather(_WRITTEN, partial(_encoded, written, newest))[0].decode()
            if name or newest == NONE:
                return name, memoryview(b"")
            if min(found)[0] == newest:
                return "", self._lying()
            sent = terms.gather(_SENT, partial(self._sent, owner))
            if any(sent):  # else who had it is gone
                return "", memoryview(max(sent, key=len))

    @property
    def _step(self) -> int:
        try:
            return NONE if self._locker is None or self._locker.empty else self._locker.rounds
        except ResourceError:
            return NONE

    def _sent(self, owner: int) -> bytes:
        return bytes(self._lying()) if owner == self._session.worker else b""

    def _lying(self) -> memoryview:
        assert self._locker is not None
        return self._locker.look()


def _encoded(written: Callable[[int], str], newest: int) -> bytes:
    return written(newest).encode()
