"""Where a run's servers are found. A run of one has its own, in this process; so has one that will not train."""

from __future__ import annotations

from paceline.servers.holders import Directory
from paceline.worker.session import Ask, Session


def parameters(session: Session) -> Directory:
    if session.ticket is None or session.dry_run:
        from paceline.servers.direct import OwnServer
        from paceline.servers.shelf import Shelf

        return OwnServer(Shelf())
    return _fleet(session, "parameters", session.ask)


def keys(session: Session) -> Directory:
    """The same for the keys of `run.kv`. Threads ask there, by a line of their own."""
    if session.ticket is None or session.dry_run:
        from paceline.servers.direct import OwnServer
        from paceline.servers.keys_shelf import KeyShelf

        return OwnServer(KeyShelf())
    return _fleet(session, "keys", session.line_of_its_own())


def _fleet(session: Session, room: str, ask: Ask) -> Directory:
    from paceline.servers.finding import FarFleet, Fleet

    assert session.ticket is not None
    secret, name = bytes.fromhex(session.ticket.secret), f"worker {session.worker}"
    if not session.apart:
        return Fleet(ask, secret, name, room)
    return FarFleet(ask, secret, name, room, session.line_of_its_own(), session.check_run)
