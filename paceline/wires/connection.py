"""The serving side's end of an admitted connection: it never waits.

`receive` gives the whole messages that are there; half a message stays until the rest comes. `send` hands
over what the socket takes and keeps the rest for `flush`, up to a bound. Nothing here raises because of what
the other side did: look at `ended` after each of the three, and `close` it then. No torch in here.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
from collections import deque
from typing import Any, NamedTuple

import msgspec

from paceline.wires import wire
from paceline.wires.wire import LENGTH, MOST_DESCRIPTORS, Decoder

_READ = 64 << 10
_READS = 4
"""In one turn: then it is another connection's."""
_BEHIND = 1 << 20
"""Bytes that may wait for a slow reader before the next message is one too many."""
_TOO_MANY = f"more than {MOST_DESCRIPTORS} descriptors beside a message"


class Received(NamedTuple):
    message: Any
    fds: list[int]
    """Whoever takes the message closes them."""


class Ended(NamedTuple):
    why: str
    foul: bool
    """It broke the rules, rather than went away."""


class Connection:
    """A socket behind the handshake, for a selector: register it for its `events`."""

    def __init__(self, sock: socket.socket, expected: Decoder, source: str = "", largest: int = wire.LARGEST) -> None:
        sock.setblocking(False)
        self._socket, self._expected, self._largest = sock, expected, largest
        self.source = source
        """Who it is, in words for the log."""
        self.ended: Ended | None = None
        self._heard = bytearray()
        self._fds: list[int] = []
        """Came beside the message of which `_heard` is the beginning."""
        self._waiting: deque[tuple[memoryview, list[int]]] = deque()
        self._waiting_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting else 0)

    @property
    def is_behind(self) -> bool:
        """Whether something of what was said is still here."""
        return bool(self._waiting)

    # in

    def receive(self) -> list[Received]:
        """The messages that have come as a whole. Those before an end or a nonsense count."""
        found: list[Received] = []
        reads = 0
        while self.ended is None and (reads < _READS or self._has_more()):
            reads += 1
            try:
                chunk, fds = self._read()
            except BlockingIOError:
                break
            except OSError as error:
                self._end(f"the connection broke: {error.strerror}")
                break
            if not chunk:
                wire.close_all(fds)
                self._end("the other side closed the connection")
                break
            self._take(chunk, fds, found)
        return found

    def _has_more(self) -> bool:
        """Bytes that TLS has taken off the socket already: no selector would tell of them."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _read(self) -> tuple[bytes, list[int]]:
        if self._socket.family != socket.AF_UNIX:
            return self._socket.recv(_READ), []
        chunk, ancillary, flags, _ = self._socket.recvmsg(_READ, wire.ROOM_FOR_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        fds = wire.descriptors_in(ancillary)
        if flags & socket.MSG_CTRUNC:  # the kernel has closed those that did not fit
            self._end(_TOO_MANY, foul=True)
        return chunk, fds

    def _take(self, chunk: bytes, fds: list[int], found: list[Received]) -> None:
        """Cut messages off what has come.

        Descriptors come with the first bytes of their message, and a read ends behind the piece that
        had some: they belong to the last message that it touched.
        """
        self._heard += chunk
        at, size = 0, len(self._heard)
        while self.ended is None and (end := self._end_of_message(at)) <= size:
            if end == size:
                self._hold(fds)
            if self.ended is None:
                found += self._decode(self._heard[at + LENGTH.size : end])
            at = end
        del self._heard[:at]
        self._hold(fds)

    def _hold(self, fds: list[int]) -> None:
        """Keep them for the message in hand."""
        self._fds += fds
        fds.clear()
        if len(self._fds) > MOST_DESCRIPTORS:
            self._end(_TOO_MANY, foul=True)

    def _end_of_message(self, at: int) -> int:
        """Where the message that begins here ends; past what has come while that is not known."""
        if len(self._heard) - at < LENGTH.size:
            return len(self._heard) + 1
        (length,) = LENGTH.unpack_from(self._heard, at)
        if length > self._largest:
            self._end(f"a message of {length} bytes is over the limit", foul=True)
            return len(self._heard) + 1
        return at + LENGTH.size + int(length)

    def _decode(self, payload: bytearray) -> list[Received]:
        try:
            message = wire.decode(payload, self._expected)
        except ValueError as error:
            self._end(f"not a message: {error}", foul=True)
            return []
        fds, self._fds = self._fds, []
        return [Received(message, fds)]

    # out

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Now as far as the other side takes it, the rest later. The descriptors stay the caller's."""
        if self.ended is not None:
            return
        if self._waiting_bytes > _BEHIND:
            self._end(f"it does not read: {self._waiting_bytes} bytes wait for it", foul=True)
            return
        data = wire.encode(message)
        self._waiting.append((memoryview(data), [os.dup(fd) for fd in fds]))
        self._waiting_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Hand over what waits, as far as it is taken."""
        while self._waiting and self.ended is None:
            data, fds = self._waiting[0]
            try:
                sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"the connection broke: {error.strerror}")
                return
            wire.close_all(fds)  # they travel with the first byte
            self._waiting_bytes -= sent
            if sent < len(data):
                self._waiting[0] = data[sent:], []
            else:
                self._waiting.popleft()

    # the end

    def _end(self, why: str, foul: bool = False) -> None:
        if self.ended is None:
            self.ended = Ended(why, foul)

    def close(self) -> None:
        """What has not been completed is dropped."""
        self._end("closed")
        self._heard.clear()
        wire.close_all(self._fds)
        while self._waiting:
            wire.close_all(self._waiting.popleft()[1])
        self._socket.close()
