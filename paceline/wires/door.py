"""Where connections come in: the handshake with many visitors at once, without waiting for any.

A door is one thing to a selector, whatever it has inside: it is readable when something is to be done.
Strangers cost the run little: they are let in at a limited pace, there is a bound to those who have not
proved themselves yet, and each source is told of once. No torch in here.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.wires.handshake import NONCE_BYTES, Gate, Move, Verdict
from paceline.wires.wire import HANDSHAKE_S, is_loopback, peer_of

_HALF_OPEN = 128
_PER_S, _AT_ONCE = 500.0, 64
"""Visitors that may fail, a second and in one go. At about 35 µs each this is under 2 % of a core (measured)."""
_SOURCES = 256
"""Sources that are told apart; from then on they are all called others."""
_OTHERS = "others"


class Secured(Protocol):
    """What TLS brings to a door; `tls.Identity` is one."""

    @property
    def binding(self) -> bytes: ...

    def wrap(self, sock: socket.socket) -> socket.socket: ...


class Arrival(NamedTuple):
    """Somebody who has proved himself. The socket does not block."""

    socket: socket.socket
    source: str


class Refusal(NamedTuple):
    source: str
    why: str
    """The first time."""


class Refusals:
    """Who was refused how often, so that each source is told of once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._untold: list[Refusal] = []

    def note(self, source: str, why: str) -> None:
        if source not in self.counts and len(self.counts) >= _SOURCES:
            source = _OTHERS
        if source not in self.counts:
            self._untold.append(Refusal(source, why))
        self.counts[source] += 1

    def untold(self) -> list[Refusal]:
        """The sources that are new since the last time."""
        new, self._untold = self._untold, []
        return new


@dataclass
class Pace:
    """So many at once, and so many a second (pure: the clock is an argument)."""

    per_s: float
    at_once: int
    now: float

    def __post_init__(self) -> None:
        self.left = float(self.at_once)

    def pass_time(self, now: float) -> None:
        self.left = min(float(self.at_once), self.left + max(0.0, now - self.now) * self.per_s)
        self.now = now

    @property
    def may(self) -> bool:
        return self.left >= 1

    @property
    def rested(self) -> bool:
        """Worth another round: one by one would wake the loop for each."""
        return self.left >= self.at_once / 4


@dataclass(eq=False)
class _Visitor:
    """One in the middle of its handshake."""

    socket: socket.socket
    gate: Gate
    source: str
    deadline: float


class Door:
    """Takes over a listening socket. Register it for reading, and call `expire` at every tick."""

    def __init__(self, server: socket.socket, secret: bytes, now: float, secured: Secured | None = None) -> None:
        if secured is None and server.family != socket.AF_UNIX and not is_loopback(server.getsockname()[0]):
            raise ValueError(f"{server.getsockname()[0]} can be reached from other machines: TLS is needed")
        server.setblocking(False)
        self._server, self._secret, self._secured = server, secret, secured
        self._visitors: dict[_Visitor, None] = {}
        """The oldest first."""
        self._pace = Pace(_PER_S, _AT_ONCE, now)
        self.refusals = Refusals()
        self._selector = selectors.EpollSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._listening = True

    def fileno(self) -> int:
        """An epoll instance can be waited for like anything else."""
        return self._selector.fileno()

    @property
    def address(self) -> str:
        """HOST:PORT of a door for other machines."""
        host, port = self._server.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def half_open(self) -> int:
        return len(self._visitors)

    @property
    def restless(self) -> bool:
        """Whether `expire` has something to do soon; else there is no need of a tick."""
        return bool(self._visitors) or not self._listening

    def on_ready(self, now: float) -> list[Arrival]:
        """Go on with everybody who said something; those who have proved themselves now."""
        self._pace.pass_time(now)
        arrivals: list[Arrival] = []
        newcomers = False
        for key, _ in self._selector.select(0):
            if key.data is None:
                newcomers = True
            elif key.data in self._visitors:
                arrivals += self._go_on(key.data)
        if newcomers:  # last: whoever is inside already comes first
            arrivals += self._let_in(now)
        return arrivals

    def expire(self, now: float) -> None:
        """Send those away whose time is over, and listen again if there was a rest."""
        self._pace.pass_time(now)
        for visitor in [v for v in self._visitors if v.deadline <= now]:
            self._refuse(visitor, "it did not prove itself in time")
        if self._pace.rested and not self._listening:
            self._selector.register(self._server, selectors.EVENT_READ)
            self._listening = True

    def close(self) -> None:
        for visitor in list(self._visitors):
            self._forget(visitor)
            visitor.socket.close()
        self._selector.close()
        self._server.close()

    def _let_in(self, now: float) -> list[Arrival]:
        arrivals: list[Arrival] = []
        while self._pace.may:
            try:
                sock, address = self._server.accept()
            except BlockingIOError:
                return arrivals
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    break  # it would be ready again at once: rest a tick
                continue  # this one left before its turn
            self._pace.left -= 1
            visitor = self._greet(sock, address, now)
            if visitor is not None:
                arrivals += self._go_on(visitor)
        self._selector.unregister(self._server)
        self._listening = False
        return arrivals

    def _greet(self, sock: socket.socket, address: object, now: float) -> _Visitor | None:
        sock.setblocking(False)
        source, ours = _source_of(sock, address)
        if not ours:
            self.refusals.note(source, "it is another user's")
            sock.close()
            return None
        binding = b""
        if self._secured is not None:
            try:
                sock, binding = self._secured.wrap(sock), self._secured.binding
            except OSError as error:
                self.refusals.note(source, f"it broke off: {error.strerror}")
                sock.close()
                return None
        if len(self._visitors) >= _HALF_OPEN:
            self._refuse(self._most_dispensable(), f"more than {_HALF_OPEN} connections without a proof")
        gate = Gate(self._secret, secrets.token_bytes(NONCE_BYTES), binding)
        visitor = _Visitor(sock, gate, source, now + HANDSHAKE_S)
        self._visitors[visitor] = None
        self._selector.register(sock, selectors.EVENT_READ, visitor)
        return visitor

    def _most_dispensable(self) -> _Visitor:
        """The oldest of the source that has the most: one who floods pushes out his own."""
        count = Counter(visitor.source for visitor in self._visitors)
        return max(self._visitors, key=lambda visitor: count[visitor.source])  # the first of equals is the oldest

    def _go_on(self, visitor: _Visitor) -> list[Arrival]:
        """As far as it goes without waiting."""
        while (move := _next_move(visitor)) is not None:
            if move.verdict is Verdict.REFUSED:
                self._refuse(visitor, move.why)
                return []
            if move.verdict is Verdict.ADMITTED:
                self._forget(visitor)
                self._pace.left += 1  # only those who fail are counted
                return [Arrival(visitor.socket, visitor.source)]
        return []

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        self._forget(visitor)
        visitor.socket.close()
        self.refusals.note(visitor.source, why)

    def _forget(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.socket)
        del self._visitors[visitor]


def _next_move(visitor: _Visitor) -> Move | None:
    """What its words lead to; None while it is silent."""
    sock = visitor.socket
    try:
        # recv and not recvmsg: the kernel closes descriptors that nobody asks for
        data = sock.recv(visitor.gate.wanted)
        if not data:
            return Move(Verdict.REFUSED, why="it went away in the middle of the handshake")
        move = visitor.gate.feed(data)
        if move.reply and sock.send(move.reply) < len(move.reply):
            return Move(Verdict.REFUSED, why="it does not read")
    except BlockingIOError:
        return None
    except OSError as error:
        return Move(Verdict.REFUSED, why=f"it broke off: {error.strerror}")
    return move


def _source_of(sock: socket.socket, address: object) -> tuple[str, bool]:
    """Who it is, in words, and whether it may knock at all."""
    if sock.family == socket.AF_UNIX:
        pid, uid = peer_of(sock)
        return f"process {pid} of user {uid}", uid == os.getuid()
    assert isinstance(address, tuple)
    return str(address[0]), True
