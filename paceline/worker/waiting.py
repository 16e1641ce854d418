"""Where a worker waits for others outside of a meeting; each wait ends when it is in vain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import PeerLostError, TermEnded
from paceline.wires.board import Phase

if TYPE_CHECKING:
    from paceline.worker.session import Session

_POLL_S = 0.001
_SLICE_S = 0.01


def for_main(session: Session) -> None:
    """Hold back until worker 0 has reached prepare(), so that a download happens once."""
    session.row.enter(Phase.WAITING_FOR_MAIN)
    while not session.board.main_ready:
        if session.board.abort:
            raise PeerLostError("the run stopped before worker 0 reached prepare()")
        if not session.joining and session.board.gone(session.view.members[0]):
            session.next_view()
            if session.is_main:
                break
        time.sleep(0.002)
    session.row.enter(Phase.SCRIPT)


def for_loop(session: Session) -> None:
    """A newcomer before its loop. Where the others have none that it could come into, it waits until the run is over."""
    session.row.enter(Phase.JOINING)
    while not any(row.step or row.total_steps for row in map(session.board.see, session.view.members)):
        session.check_run()
        time.sleep(_POLL_S)
    session.row.enter(Phase.SCRIPT)


def for_change(session: Session, until: float | None, least: int) -> None:
    """Until a change of the view is announced, a member is gone, or it is so late on the monotonic clock. None: however
    late, because the run does not go on with fewer than `least`."""
    members = session.view.members
    while session.board.next_term <= session.view.term and not (
        session.overtaken or any(map(session.board.gone, members))
    ):
        if until is not None and time.monotonic() >= until:
            return
        session.row.enter(Phase.REFILL)
        session.check_run()
        if until is None and session.board.reach < least:
            raise PeerLostError(
                f"{len(members)} replicas are left, and the run goes on with {least} or more: only {session.board.reach} workers will "
                "be there. Pass a smaller --min-workers, or go on from a checkpoint, if there is one (`paceline resume`)"
            )
        session.give_up_unled()
        time.sleep(_POLL_S)


def for_copy(session: Session, is_there: Callable[[float], bool]) -> None:
    """Until what this replica has left is on another machine too; or its view is over, and with that the other machine may be."""
    while not is_there(_SLICE_S):
        session.check_run()
        if session.overtaken:
            raise TermEnded(f"term {session.view.term} is over")
        session.give_up_unled()


def for_guests(session: Session, trainers: list[int]) -> bool:
    """Whether some who have trained here are not in the view; until a change of it is announced, or a member is gone."""
    while True:
        guests = [k for k in trainers if k not in session.view.members and not session.board.gone(k)]
        changed = session.board.next_term > session.view.term or any(map(session.board.gone, session.view.members))
        if not guests or changed:
            return bool(guests)
        session.check_run()
        time.sleep(_POLL_S)
