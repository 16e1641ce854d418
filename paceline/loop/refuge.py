"""Where a run goes back to in which each worker keeps something that nobody else has: what a codec leaves out, on several machines.

At each checkpoint all workers get all of it (`Lasting.collect`), and on every machine one of them leaves the whole state in memory that
outlives its processes. After a death all begin again from the newest such state on any machine, which the others are sent. So any
machine may be lost with its disk, and the checkpoint being written then; the files are for when all are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import ResourceError
from paceline.state.buddies import NONE
from paceline.state.lockers import Locker
from paceline.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from paceline.worker.session import Session


class Refuge:
    """This machine's. Who of its workers gets hold of it first leaves the state there, until its end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._locker = Locker(0, session.segment) if session.apart and not session.dry_run else None
        self._told = False

    @property
    def step(self) -> int:
        """Of the state that lies here."""
        return NONE if self._locker is None or self._locker.empty else self._locker.rounds

    def look(self) -> memoryview:
        """That state, while nobody trains."""
        assert self._locker is not None
        return self._locker.look()

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
