"""The state of a replica that trains apart, from a worker of one machine to one of another, over a connection of its own.

Numbers and states pass, both ways; a state in chunks with a checksum each. It is for threads that have nothing else to do:
every call waits, and asks `check` while it does. No torch in here.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import zlib
from collections.abc import Callable

import msgspec

from paceline.wires.stream import Check, hang_up, ready, receive_into

_NUMBER = struct.Struct("<q")
_CHECKSUM = struct.Struct("<I")
_CHUNK, _WORDS = 1 << 20, 64 << 20


class Leave(msgspec.Struct, tag=True, frozen=True):
    """A copy of this slot's state is to be taken in. The round at whose end it was taken follows, its size, and of what pieces it
    is; the answer says which of them are not there yet. These follow; the answer, once all is whole in the locker, is the round."""

    slot: int
    worker: int


class Survey(msgspec.Struct, tag=True, frozen=True):
    """What lies on this machine: the answer is the round of each slot's state, -1 where there is none."""

    worker: int


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """This slot's state that lies there: the round and the state are the answer."""

    slot: int
    worker: int


class Passage:
    """One end. A ConnectionError says that the other one is gone, or sends nonsense."""

    def __init__(self, sock: socket.socket, check: Check) -> None:
        self._socket, self._check = sock, check

    def say(self, *numbers: int) -> None:
        self._send(memoryview(b"".join(map(_NUMBER.pack, numbers))))

    def hear(self) -> int:
        return int(_NUMBER.unpack(self._take(_NUMBER.size))[0])

    def tell(self, words: bytes) -> None:
        self.say(len(words))
        self._send(memoryview(words))

    def told(self) -> memoryview:
        size = self.hear()
        if not 0 <= size <= _WORDS:
            raise ConnectionError(f"words of {size} bytes")
        return self._take(size)

    def pass_on(self, stretch: memoryview) -> None:
        """Of which the other one knows how long it is, and what it should be."""
        self._check()  # it is not copied before: it may not be for long what it was
        self._send(stretch)

    def take(self, stretch: memoryview) -> None:
        self._read(stretch)

    def send(self, state: memoryview) -> None:
        self.say(state.nbytes)
        for at in range(0, state.nbytes, _CHUNK):
            chunk = state[at : at + _CHUNK]
            self._send(memoryview(_CHECKSUM.pack(zlib.crc32(chunk))))
            self._send(chunk)

    def receive(self, room_for: Callable[[int], memoryview]) -> None:
        """A state, to where there is room for it."""
        size = self.hear()
        if size <= 0:
            raise ConnectionError(f"a state of {size} bytes")
        room = room_for(size)
        for at in range(0, size, _CHUNK):
            (checksum,) = _CHECKSUM.unpack(self._take(_CHECKSUM.size))
            chunk = room[at : at + _CHUNK]
            self._read(chunk)
            if zlib.crc32(chunk) != checksum:
                raise ConnectionError("what came of a state is not what was sent")

    def _take(self, size: int) -> memoryview:
        taken = memoryview(bytearray(size))
        self._read(taken)
        return taken

    def _read(self, rest: memoryview) -> None:
        receive_into(self._socket, rest, self._wait)

    def _send(self, rest: memoryview) -> None:
        while rest.nbytes:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _wait(self, events: int) -> None:
        if not ready(self._socket.fileno(), events):
            self._check()

    def end(self) -> None:
        """For another thread: whoever waits here has its connection ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        hang_up(self._socket)
