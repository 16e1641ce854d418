"""An agent that stands by: it holds what must outlive the leader, and takes over when that is gone.

A dead leader is seen at once through its pidfd, a frozen one by its silence on the board: no beat for a
lease. Which of them leads is decided in the store, by the fence. No torch in here.

One that was only slow may still be giving out shared memory. Two workers that ask for the same memory, one of them
each leader, must not get two: so whoever takes over writes its fence on the board first, and then takes all that the other
has sent; and that one sends what it makes, and then looks at the board, before it answers (`Node.check_hold`).
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass

from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import FencedError, Record, Store, StoreGone
from paceline.wires import messages, wire
from paceline.wires.board import Board

_LOOK_S = 0.25


@dataclass(frozen=True)
class Lead:
    """The lead of a run: where its decisions go, under which fence, and what must outlive whoever has it."""

    store: Store
    fence: int
    kept: Kept


class _Over(Exception):
    """The run is over: there is nothing to stand by for."""


class Orphaned(Exception):
    """Nobody has handed anything over for too long: the agents before are gone, and this one cannot lead."""


def stand_by(place: Rendezvous, store: Store, lease_s: float, grace_s: float) -> Lead | None:
    """Wait for the leader's end and take over; None if the run has ended. Orphaned: nobody can lead it any more."""
    deadline = time.monotonic() + grace_s
    while True:
        kept = Kept()
        try:
            record = store.read()
            return Lead(store, _follow(record, place, store, kept, lease_s), kept)
        except (_Over, StoreGone):
            kept.close()
            return None
        except FencedError:  # another one was faster: stand by for that one
            now = time.monotonic()
            if kept.get(BOARD) is not None:
                deadline = now + grace_s
            kept.close()
            if now > deadline:
                raise Orphaned(f"no agent has handed this machine over for {grace_s:g} s") from None


def _follow(record: Record, place: Rendezvous, store: Store, kept: Kept, lease_s: float) -> int:
    """Hold what this leader sends until it is gone; the own fence."""
    try:
        leader = os.pidfd_open(record.pid)
    except ProcessLookupError:
        leader = -1
    try:
        with wire.connect(f"{place.address}-{record.fence}", place.secret) as sock:
            wire.send(sock, messages.Shadow(os.getpid()))
            if _hold(sock, leader, kept, lease_s) and place.store.exists() and kept.get(BOARD) is not None:
                return _take_over(record, store, sock, kept)
    except OSError:
        pass
    finally:
        if leader >= 0:
            os.close(leader)
    if not place.store.exists():
        raise _Over
    # Cut off from a leader that lives, or it went before it had handed over: try again, with what there is.
    time.sleep(_LOOK_S)
    raise FencedError("this agent cannot lead")


def _take_over(record: Record, store: Store, sock: socket.socket, kept: Kept) -> int:
    """The own fence. From when it is on the board the last leader gives nothing out; what it gave before has been sent."""
    found = kept.get(BOARD)
    assert found is not None
    with closing(Board(os.dup(found[0]), found[1])) as board:
        fence = store.lead(record.fence, os.getpid())
        board.leader = fence
    sock.setblocking(False)
    with suppress(OSError):  # until there is no more, or its end has come
        while True:
            _take(sock, kept)
    return fence


def _hold(sock: socket.socket, leader: int, kept: Kept, lease_s: float) -> bool:
    """Until the leader is dead or silent for a lease (True), or this agent is cut off from it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if leader >= 0:
        poll.register(leader, select.POLLIN)
    board: Board | None = None
    try:
        while True:
            ready = {fd for fd, _ in poll.poll(_LOOK_S * 1000)}
            if sock.fileno() in ready:
                board = _take(sock, kept) or board
            elif leader in ready or (board is not None and board.silence_s > lease_s):
                return True
    except OSError:
        return _is_dead(leader)  # and everything that it had sent has been taken
    finally:
        if board is not None:
            board.close()


def _is_dead(leader: int) -> bool:
    """A process that is ending closes its sockets first: give it a moment."""
    poll = select.poll()
    if leader >= 0:
        poll.register(leader, select.POLLIN)
    return leader < 0 or bool(poll.poll(_LOOK_S * 1000))


def _take(sock: socket.socket, kept: Kept) -> Board | None:
    """One message of the leader's; the board, if it is that."""
    message, fds = wire.receive(sock, messages.ANY)
    match message:
        case messages.Welcome(rows=rows):
            return Board(fds[0], rows)
        case messages.Keep(name, size):
            kept.keep(name, fds[0], size)
        case messages.Release(name):
            kept.release(name)
        case messages.Ended():
            wire.close_all(fds)
            raise _Over
        case _:
            wire.close_all(fds)
    return None
