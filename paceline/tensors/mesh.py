"""Connections between all members of one group, and the one thing that is done over them: a swap.

In a swap every member sends and receives at once, whatever it has for each other one; how much that is
both sides know. Nothing is copied on the way between the kernel and the memory that was named. A mesh
belongs to one term: a connection that breaks stays broken, and is no error by itself. Who is gone is for
the watch to say, which is asked while somebody's bytes are missing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from paceline.errors import PeerLostError
from paceline.tensors.peers import Watch
from paceline.wires.calling import Want, call
from paceline.wires.listener import Call, Listener

_SLICE_S = 0.01
_AGAIN_S = 0.05
"""Between two attempts to reach somebody."""
_LOST_S = 60.0
"""So long a lost connection is waited on for the watch to say who is gone."""
_AT_ONCE = 64
"""Stretches of memory in one call of the kernel."""
_LOT = 64 << 10
"""Bytes that are worth waking up for, while far more are on their way."""

_NOTHING: Want = (-1, 0)

Thing = TypeVar("Thing")
Views = Sequence[memoryview]
"""Stretches of memory, as bytes."""


@dataclass(frozen=True)
class Lines:
    """How the leaders of a group reach each other."""

    listener: Listener
    """This worker's own."""
    addresses: Sequence[str]
    """Of every leader's listener, in order."""
    secret: bytes


class Line:
    """One connection, and what is still to pass over it in the swap at hand."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self._socket = rank, sock
        self._many = not isinstance(sock, ssl.SSLSocket)  # TLS takes one stretch at a time
        self._out: deque[memoryview] = deque()
        self._into: deque[memoryview] = deque()
        self._due, self._wakes_at = 0, 1
        """Bytes still to come in this swap; how many must be here before the kernel wakes us."""
        self._mute = self._deaf = False
        """It is broken: nothing more can be sent, nothing more will come."""
        self.lost_at: float | None = None
        self.sent_bytes = 0

    def load(self, out: Views, into: Views) -> None:
        # An empty stretch would read like the end of the connection.
        self._out = deque() if self._mute else deque(view for view in out if view.nbytes)
        self._into = deque(view for view in into if view.nbytes)
        self._due = sum(view.nbytes for view in self._into)

    @property
    def owes(self) -> bool:
        """Whether we still wait for its bytes."""
        return bool(self._into)

    @property
    def done(self) -> bool:
        return not self._into and not self._out

    @property
    def want(self) -> Want:
        """What to wait for; no events where waiting is in vain."""
        reading = select.POLLIN if self._into and not self._deaf else 0
        if reading:
            self._wake_seldom()
        return self._socket.fileno(), reading | (select.POLLOUT if self._out else 0)

    def _wake_seldom(self) -> None:
        """On a thin link each packet would wake us, for a kilobyte: a quarter of a core's time, which the training beside it
        lacks, and a fifth of that so (measured, 100 Mbit/s). Not near the end: TLS may hold back a record of what the kernel
        has handed over."""
        at = _LOT if self._due > 2 * _LOT else 1
        if at != self._wakes_at:
            self._wakes_at = at
            with contextlib.suppress(OSError):  # it only saves time
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)

    def move(self) -> bool:
        """Send and receive what can be without waiting; whether that was anything."""
        sent = self._send() if self._out else False
        return (self._receive() if self._into and not self._deaf else False) or sent

    def _send(self) -> bool:
        try:
            if self._many:
                count = self._socket.sendmsg(list(islice(self._out, _AT_ONCE)))
            else:
                count = self._socket.send(self._out[0])
        except BlockingIOError:
            return False
        except OSError:
            # What it has sent before may still be here: with that the meeting can be complete for us.
            self._mute = True
            self._out.clear()
            self._lose()
            return False
        _advance(self._out, count)
        self.sent_bytes += count
        return True

    def _receive(self) -> bool:
        try:
            if self._many:
                count = self._socket.recvmsg_into(list(islice(self._into, _AT_ONCE)))[0]
            else:
                count = self._socket.recv_into(self._into[0])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self._deaf = True
            self._lose()
            return False
        _advance(self._into, count)
        self._due -= count
        return True

    def _lose(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Close it for processes that were forked off this one, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _advance(views: deque[memoryview], count: int) -> None:
    while views and count >= views[0].nbytes:
        count -= views.popleft().nbytes
    if count:
        views[0] = views[0][count:]


class Mesh:
    """Use `meet` to get one. It is abandoned by closing or dropping it, which never waits."""

    def __init__(self, rank: int, lines: Sequence[Line], watch: Watch) -> None:
        self.rank, self.size = rank, len(lines) + 1
        self.waited_s = 0.0
        self._lines, self._watch = list(lines), watch

    @property
    def sent_bytes(self) -> int:
        return sum(line.sent_bytes for line in self._lines)

    def swap(self, outgoing: Sequence[Views], incoming: Sequence[Views]) -> None:
        """For each rank what it is sent, and the memory that what it sends goes to. One's own are not looked at."""
        for line in self._lines:
            line.load(outgoing[line.rank], incoming[line.rank])
        waiting = _Waiting(self._watch)
        ready = self._lines
        while ready or (ready := self._wait(waiting)):
            ready = [line for line in ready if line.move()]
        self.waited_s += waiting.seconds

    def _wait(self, waiting: _Waiting) -> list[Line]:
        """The lines with which it goes on; none once all is done."""
        while unfinished := [line for line in self._lines if not line.done]:
            laggard = next((line for line in unfinished if line.owes), unfinished[0])
            if ready := waiting.turn([(line.want, line) for line in unfinished], laggard.rank):
                return ready
            lost_at = laggard.lost_at
            if lost_at is not None and time.monotonic() - lost_at > _LOST_S:
                raise PeerLostError(f"the connection to machine {laggard.rank} broke, and nobody said why")
        return []

    def close(self) -> None:
        while self._lines:
            self._lines.pop().hang_up()

    def __del__(self) -> None:
        for line in self._lines:
            line.close()


class _Waiting:
    """A wait, in turns; the watch is asked at least every 10 ms of it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._start = self._asked = time.perf_counter()
        self.seconds = 0.0
        """Spent in turns so far."""

    def turn(self, wants: Sequence[tuple[Want, Thing]], laggard: int) -> list[Thing]:
        """What is ready now, or within a slice of time; nothing is a common answer."""
        poll, things = select.poll(), {}
        for (fd, events), thing in wants:
            if events:  # a broken connection is always ready
                poll.register(fd, events)
                things[fd] = thing
        before = time.perf_counter()
        if before - self._asked >= _SLICE_S:
            self.ask(laggard)
        ready = poll.poll(_SLICE_S * 1e3)
        self.seconds += time.perf_counter() - before
        return [things[fd] for fd, _ in ready]

    def ask(self, laggard: int) -> None:
        self._asked = time.perf_counter()
        self._watch.check(self._asked - self._start, laggard)


class _Attempts:
    """Calling one member until it answers."""

    def __init__(self, rank: int, label: Call, lines: Lines) -> None:
        self.rank, self._label, self._lines = rank, label, lines
        self.socket: socket.socket | None = None
        self._call = self._begin()
        self._again_at, self._failed_at = 0.0, 0.0

    def _begin(self) -> Generator[Want, None, socket.socket]:
        return call(self._lines.addresses[self.rank], self._lines.secret, self._label)

    def go_on(self) -> Want | None:
        """As far as it goes: what to wait for now, if for anything."""
        now = time.monotonic()
        if now < self._again_at:
            return None
        try:
            return next(self._call)
        except StopIteration as end:
            self.socket = end.value
        except OSError as error:
            self._failed_at = self._failed_at or now
            if now - self._failed_at > _LOST_S:
                where = self._lines.addresses[self.rank]
                raise PeerLostError(f"machine {self.rank} does not answer at {where}: {error}") from None
            self._call, self._again_at = self._begin(), now + _AGAIN_S
        return None

    def drop(self) -> None:
        self._call.close()
        if self.socket is not None:
            self.socket.close()


def meet(name: str, rank: int, lines: Lines, watch: Watch) -> Mesh:
    """The mesh of the group of this name. Who has the higher rank calls; every listener answers by itself,
    so nobody waits for one who waits."""
    waiting = _Waiting(watch)
    attempts = [_Attempts(lower, Call(name, rank), lines) for lower in range(rank)]
    found: list[Line] = []
    try:
        _reach(attempts, waiting)
        found += [Line(each.rank, each.socket) for each in attempts if each.socket is not None]
        for higher in range(rank + 1, len(lines.addresses)):
            sock = lines.listener.take(Call(name, higher), partial(waiting.ask, higher))
            found.append(Line(higher, sock))
    except BaseException:
        for each in attempts:
            each.drop()
        for line in found:
            line.close()
        raise
    finally:
        lines.listener.forget(name)
    return Mesh(rank, found, watch)


def _reach(attempts: Sequence[_Attempts], waiting: _Waiting) -> None:
    """Until all have answered."""
    wants: dict[int, Want | None] = {each.rank: each.go_on() for each in attempts}
    while unfinished := [each for each in attempts if each.socket is None]:
        ready = waiting.turn([(wants[each.rank] or _NOTHING, each) for each in unfinished], unfinished[0].rank)
        for each in unfinished:
            if each in ready or wants[each.rank] is None:
                wants[each.rank] = each.go_on()
