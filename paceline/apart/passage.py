"""The state of a replica that trains apart, from a worker of one machine to one of another, over a connection of its own.

Who sends it says first of what pieces it is, with a checksum each; the other one answers which of them it lacks. So what lies
there already is not sent, and a state whose connection broke in the middle goes on where it was. On a thin link pieces are packed (`planes`).
It is for threads that have nothing else to do: every call waits, and asks `check` while it does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.apart import planes
from paceline.errors import ResourceError
from paceline.state.alike import Piece, arrived, checksum, fill, missing, pieces
from paceline.state.lockers import Locker
from paceline.wires.stream import Check, hang_up, ready, receive_into

_NUMBER = struct.Struct("<q")
_WORDS = 64 << 20
_PLAIN = 0
_TELLING = 64 << 10
"""Bytes whose way takes long enough to tell what link it is."""
_THIN = 50e6
"""Bytes a second; what packing saves takes longer on a slower link than packing and unpacking it."""
_ENCODE = msgspec.msgpack.encode


Known = Mapping[bytes, memoryview]


class Leave(msgspec.Struct, tag=True, frozen=True):
    """A copy of this slot's state is to be taken in: it follows. The answer, once all is whole in the locker, is its round."""

    slot: int
    worker: int


class Survey(msgspec.Struct, tag=True, frozen=True):
    """What lies on this machine: the answer is the round of each slot's state, -1 where there is none."""

    worker: int


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """This slot's state that lies there is the answer."""

    slot: int
    worker: int


class Meter:
    """Counts what several threads send."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._guard = threading.Lock()

    def add(self, count: int) -> None:
        with self._guard:
            self.sent_bytes += count


class Passage:
    """One end. A ConnectionError says that the other one is gone, or sends nonsense."""

    def __init__(self, sock: socket.socket, check: Check, meter: Meter) -> None:
        self._socket, self._check, self._meter = sock, check, meter
        self._thin = False
        """Whether the link is one for which packing pays."""

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
        """Of which the other one knows how long it is, and what it should be. Packed, if the one before has taken long."""
        self._check()  # it is not copied before: it may not be for long what it was
        begun = time.monotonic()
        packed = planes.pack(stretch) if self._thin else []
        self.say(packed[0].nbytes if packed else _PLAIN)
        for part in packed or [stretch]:
            self._send(part)
        if stretch.nbytes >= _TELLING:
            self._thin = stretch.nbytes < _THIN * (time.monotonic() - begun)

    def take(self, stretch: memoryview) -> None:
        size = self.hear()
        if size == _PLAIN:
            self._read(stretch)
        elif 0 < size < stretch.nbytes:
            packed, others = self._take(size), self._take(planes.rest_of(stretch.nbytes))
            try:
                planes.unpack(packed, others, stretch)
            except ValueError as error:
                raise ConnectionError(f"nonsense: {error}") from None
        else:
            raise ConnectionError(f"{size} bytes for {stretch.nbytes}")

    def _take(self, size: int) -> memoryview:
        taken = memoryview(bytearray(size))
        self._read(taken)
        return taken

    def _read(self, rest: memoryview) -> None:
        receive_into(self._socket, rest, self._wait)

    def _send(self, rest: memoryview) -> None:
        while rest.nbytes:
            try:
                sent = self._socket.send(rest)
            except BlockingIOError:
                self._wait(select.POLLOUT)
            else:
                self._meter.add(sent)
                rest = rest[sent:]

    def _wait(self, events: int) -> None:
        if not ready(self._socket.fileno(), events):
            self._check()

    def end(self) -> None:
        """For another thread: whoever waits here has its connection ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        hang_up(self._socket)


def send_state(passage: Passage, rounds: int, state: memoryview) -> None:
    """With the round at whose end it was taken."""
    cut = pieces(state)
    passage.say(rounds, state.nbytes)
    passage.tell(_ENCODE(cut))
    for number in _decoded(passage.told(), list[int] | None) or ():
        if number < len(cut):
            passage.pass_on(state[cut[number].begin : cut[number].end])


def take_state(passage: Passage, locker: Locker, known: Callable[[int], Known], again: bool) -> int:
    """It into the locker; its round. `known`: what lies here of states of that round, by checksum; `again`: some of this one may
    be where it belongs. Where there is no memory for it, a ResourceError, and the other one is told so."""
    rounds, size = passage.hear(), passage.hear()
    wanted: list[Piece] = _decoded(passage.told(), list[Piece])
    if size <= 0:
        raise ConnectionError(f"a state of {size} bytes")
    here = known(rounds)
    try:
        room = locker.room_for(size)
    except ResourceError:
        passage.tell(_ENCODE(None))
        raise
    there = arrived(room, wanted) if again else []
    numbers = missing(wanted, [*here, *(wanted[number].checksum for number in there)])
    passage.tell(_ENCODE(numbers))
    for number in numbers:
        stretch = room[wanted[number].begin : wanted[number].end]
        passage.take(stretch)
        if checksum(stretch) != wanted[number].checksum:
            raise ConnectionError("what came of a state is not what was sent")
    if not fill(room, wanted, [*there, *numbers], here):
        raise ConnectionError("what was here has changed meanwhile")
    locker.settle(rounds)
    return rounds


def _decoded(words: memoryview, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(words, type=kind)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"nonsense: {error}") from None
