"""A channel over a connected, authenticated socket: Unix, TCP, or TCP under TLS.

A body goes from where it lies into the kernel, and from the kernel to where it belongs, without a copy in
between. Plain sockets block, and the kernel is asked for whole stretches at a time. Under TLS the library
keeps state that reading and writing share, so each step is taken under a lock and waited for outside it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections import deque
from itertools import islice
from typing import Protocol

from paceline.tensors.channel import (
    LARGEST_HEAD,
    PREFIX,
    Buffer,
    ChannelEnded,
    ChannelError,
    Place,
    Received,
    Spare,
    Taken,
    TornMessage,
    byte_views,
    ending_with,
    lend,
    lengths,
    placed,
    prefix,
)
from paceline.wires import calling, wire

_AT_ONCE = 64
"""Stretches of memory in one call of the kernel."""
_NEAR_BUFFER = 256 << 10
"""Of a socket to the same machine: what lies in the kernel then still lies in a cache when it is read. 64 MB out
and back took 27 ms, and 40 to 46 ms with the kernel's own choice or 1 to 4 MB (measured)."""


def tune(sock: socket.socket) -> None:
    """For large bodies. Between machines buffers stay the kernel's affair (`wires.calling.tune`)."""
    if sock.family != socket.AF_UNIX:
        calling.tune(sock)
        if not wire.is_loopback(sock.getpeername()[0]):
            return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEAR_BUFFER)


class _Pipe(Protocol):
    """What a channel needs of a socket. Both wait, for at least a byte; nothing received is the end."""

    def send(self, views: deque[memoryview]) -> int: ...

    def receive_into(self, view: memoryview) -> int: ...


class _Plain:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock

    def send(self, views: deque[memoryview]) -> int:
        return self._socket.sendmsg(list(islice(views, _AT_ONCE)))

    def receive_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)


class _Secured:
    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._socket, self._lock = sock, threading.Lock()

    def send(self, views: deque[memoryview]) -> int:
        while True:
            with self._lock, contextlib.suppress(BlockingIOError):
                return self._socket.send(views[0])
            self._wait(select.POLLOUT)

    def receive_into(self, view: memoryview) -> int:
        while True:
            with self._lock, contextlib.suppress(BlockingIOError):
                return self._socket.recv_into(view)
            self._wait(select.POLLIN)

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        poll.poll()


class StreamChannel:
    """Takes over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        tune(sock)
        self._socket = sock
        self._pipe: _Pipe = _Secured(sock) if isinstance(sock, ssl.SSLSocket) else _Plain(sock)
        self._sending = threading.Lock()
        self._head = memoryview(bytearray(PREFIX.size + LARGEST_HEAD))
        self._spare = Spare()
        self._over = False

    def send(self, head: bytes, *buffers: Buffer, taken: Taken | None = None) -> None:
        views = byte_views(buffers)
        first = prefix(head, sum(view.nbytes for view in views)) + head
        out = deque([memoryview(first), *views])
        with self._sending, ending_with(taken):
            try:
                while out:
                    if self._over:
                        raise self._ended()
                    advance(out, self._pipe.send(out))
            except ChannelError:
                raise
            except OSError as error:
                raise self._ended(error) from None
            finally:
                # Half a message is on its way: whatever followed would be taken for its rest.
                if out:
                    self.hang_up()

    def receive(self, place: Place = lend) -> Received:
        start = self._head[: PREFIX.size]
        self._read(start, ChannelEnded)
        size, nbytes = lengths(start)
        self._read(self._head[:size])
        head = bytes(self._head[:size])
        if not nbytes:
            return Received(head, memoryview(b""))
        body = placed(place, head, nbytes)
        if body is None:
            body = self._spare.take(nbytes)
        self._read(body)
        return Received(head, body)

    def _read(self, view: memoryview, end: type[ChannelError] = TornMessage) -> None:
        """Until it is full. `end`: what it is called if nothing comes at all."""
        while view.nbytes:
            try:
                count = self._pipe.receive_into(view)
            except OSError as error:
                raise self._ended(error, end) from None
            if not count or self._over:
                raise self._ended(None, end)
            view, end = view[count:], TornMessage

    def _ended(self, error: OSError | None = None, kind: type[ChannelError] = ChannelEnded) -> ChannelError:
        if self._over:
            return ChannelEnded("the channel is closed")
        where = "in the middle of a message" if kind is TornMessage else "between two messages"
        return kind(f"the other side ended the channel {where}" + (f": {error.strerror or error}" if error else ""))

    def release(self) -> None:
        pass

    def hang_up(self) -> None:
        self._over = True
        hang_up(self._socket)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()


def hang_up(sock: socket.socket) -> None:
    """Also for processes that were forked off this one, and for threads that wait for it."""
    with contextlib.suppress(OSError):
        # An SSL socket's own would make a plain socket of it under whoever is reading.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def advance(views: deque[memoryview], count: int) -> None:
    """So many bytes of them are gone."""
    while views and count >= views[0].nbytes:
        count -= views.popleft().nbytes
    if count:
        views[0] = views[0][count:]
