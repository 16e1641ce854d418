"""From a donor to a newcomer, over a connection of its own: the run's state, and then entry by entry what comes
of the donor's meetings.

A message goes in chunks, each with its place and a checksum, so that other things can be seen to in
between. The newcomer answers every message that it has taken by one byte. No torch in here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable

import msgspec

from paceline.errors import OvertakenError
from paceline.wires.calling import call
from paceline.wires.pace import Pace

_HEAD = struct.Struct("<qqqqI")
"""Of a chunk: the message's number and size, where in it the chunk begins, `Pace.near`, checksum."""
_CHUNK = 1 << 20
_TAKEN = b"\1"
_SLICE_S = 0.01
Check = Callable[[], None]
"""Called at least every 100 ms of a wait; it ends it by raising."""


class Heal(msgspec.Struct, tag=True, frozen=True):
    """A newcomer calls a member: it wants the run's state, and to follow."""

    worker: int


class Giving:
    """The donor's end: one thread sends what is put. The first message is the state."""

    def __init__(self, worker: int, sock: socket.socket, check: Check) -> None:
        self.worker, self._socket, self._check = worker, sock, check
        self._changed = threading.Condition()
        """Guards what follows."""
        self._queue: deque[memoryview] = deque()
        self._pace: Pace | None = None
        self.ended = False
        """The newcomer is gone, or needs nothing any more."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=f"paceline-donor-{worker}", daemon=True)

    # the worker's side

    def put(self, message: bytes | bytearray) -> None:
        with self._changed:
            if self.ended:
                return
            self._queue.append(memoryview(message))
            if self._pace is None:
                self._pace = Pace(len(message))
                self._thread.start()
            else:
                self._pace.put(len(message), time.monotonic())
            os.eventfd_write(self._bell, 1)

    def keep_pace(self) -> None:
        """Before a meeting: wait while the newcomer is too far behind."""
        while True:
            with self._changed:
                if self.ended or self._pace is None or self._pace.may_meet(time.monotonic()):
                    return
                self._changed.wait(_SLICE_S)
            self._check()

    def close(self) -> None:
        with self._changed:
            self.ended = True
            if self._pace is None and self._bell >= 0:
                self._let_go()
            elif self._bell >= 0:
                os.eventfd_write(self._bell, 1)  # the thread closes the connection

    # the thread

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        out: deque[memoryview] = deque()
        chunks = _Chunks()
        try:
            while not self.ended:
                self._hear()
                if not out:
                    with self._changed:
                        assert self._pace is not None
                        out.extend(chunks.next(self._queue, self._pace.near))
                if out and self._send(out):
                    continue
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if out else 0))
                if any(fd == self._bell for fd, _ in poll.poll()):
                    os.eventfd_read(self._bell)
        except OSError:
            pass  # the newcomer is gone
        with self._changed:
            self.ended = True
            self._let_go()
            self._changed.notify_all()

    def _let_go(self) -> None:
        self._queue.clear()
        hang_up(self._socket)
        os.close(self._bell)
        self._bell = -1

    def _send(self, out: deque[memoryview]) -> bool:
        try:
            count = self._socket.send(out[0])
        except BlockingIOError:
            return False
        out[0] = out[0][count:]
        if not out[0].nbytes:
            out.popleft()
        return True

    def _hear(self) -> None:
        """What the newcomer has taken."""
        try:
            said = self._socket.recv(4096)
        except BlockingIOError:
            return
        if not said:
            raise ConnectionResetError("the newcomer has hung up")
        with self._changed:
            for _ in said:
                assert self._pace is not None
                self._pace.taken(time.monotonic())
            self._changed.notify_all()


class _Chunks:
    """Messages, cut up."""

    def __init__(self) -> None:
        self._number = self._at = 0

    def next(self, queue: deque[memoryview], near: bool) -> list[memoryview]:
        """The next chunk and its head; nothing, if there is none. A message leaves the queue with its last one."""
        if not queue:
            return []
        message = queue[0]
        chunk = message[self._at : self._at + _CHUNK]
        head = _HEAD.pack(self._number, message.nbytes, self._at, near, zlib.crc32(chunk))
        self._at += chunk.nbytes
        if self._at == message.nbytes:
            queue.popleft()
            self._number, self._at = self._number + 1, 0
        return [memoryview(head), chunk]


class Taking:
    """The newcomer's end."""

    def __init__(self, sock: socket.socket, check: Check) -> None:
        self._socket, self._check = sock, check
        self._number = 0
        self.near = False
        """Whether there is hardly anything left to take behind the last message."""

    def take(self) -> memoryview:
        """The next message, once it is there. OvertakenError: the donor is gone."""
        message, head = memoryview(bytearray()), memoryview(bytearray(_HEAD.size))
        filled = 0
        while not filled or filled < message.nbytes:
            self._read(head)
            number, size, at, near, checksum = _HEAD.unpack(head)
            if not filled:
                message = memoryview(bytearray(size))
            if (number, size, at) != (self._number, message.nbytes, filled) or not size:
                raise OvertakenError(f"message {number} came at {at} where {self._number} was due at {filled}")
            chunk = message[at : at + _CHUNK]
            self._read(chunk)
            if zlib.crc32(chunk) != checksum:
                raise OvertakenError(f"what came of message {number} is not what was sent")
            filled += chunk.nbytes
        self._number, self.near = self._number + 1, bool(near)
        self._say(_TAKEN)
        return message

    def _read(self, rest: memoryview) -> None:
        try:
            receive_into(self._socket, rest, self._wait)
        except OSError as error:
            raise OvertakenError(f"the donor is gone: {error}") from None

    def _say(self, words: bytes) -> None:
        while True:
            try:
                self._socket.send(words)
                return
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise OvertakenError(f"the donor is gone: {error}") from None

    def _wait(self, events: int) -> None:
        if not ready(self._socket.fileno(), events):
            self._check()

    def close(self) -> None:
        hang_up(self._socket)


def receive_into(sock: socket.socket, rest: memoryview, wait: Callable[[int], None]) -> None:
    """Until it is full; `wait` is called as long as there is nothing. OSError: the other one is gone."""
    while rest.nbytes:
        try:
            got = sock.recv_into(rest)
        except BlockingIOError:
            wait(select.POLLIN)
            continue
        if not got:
            raise ConnectionError("it has hung up")
        rest = rest[got:]


def hang_up(sock: socket.socket) -> None:
    """For processes that were forked off this one, too."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def reach(address: str, secret: bytes, worker: int, check: Check) -> Taking:
    """Call the member at this address for its state. OSError: it cannot be reached."""
    return Taking(connect(address, secret, Heal(worker), check), check)


def connect(address: str, secret: bytes, label: msgspec.Struct, check: Check) -> socket.socket:
    """Call the worker at this address for what the label says. OSError: it cannot be reached."""
    attempt = call(address, secret, label)
    while True:
        try:
            fd, events = next(attempt)
        except StopIteration as end:
            sock: socket.socket = end.value
            return sock
        try:
            while not ready(fd, events):
                check()
        except BaseException:
            attempt.close()
            raise


def ready(fd: int, events: int) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(_SLICE_S * 1e3))
