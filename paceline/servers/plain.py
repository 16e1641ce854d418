"""Interim transport."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from concurrent.futures import Future

import msgspec

from paceline.cluster import wire
from paceline.servers.lines import Reply
from paceline.servers.messages import Call, Done, Moved, Refusal
from paceline.servers.shelf import Shelf

_SIZES = struct.Struct("<IQ")
_CALLS = msgspec.msgpack.Decoder(Call)
_REPLIES = msgspec.msgpack.Decoder(Done | Refusal | Moved)


def _send(sock: socket.socket, head: bytes, body) -> None:
    size = sum(len(b) for b in body)
    sock.sendall(_SIZES.pack(len(head), size) + head)
    for b in body:
        sock.sendall(b)


def _exactly(sock: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        n = sock.recv_into(into[at:])
        if not n:
            raise ConnectionError("the server is gone")
        at += n


def _head(sock: socket.socket) -> tuple[bytes, int]:
    raw = bytearray(_SIZES.size)
    _exactly(sock, memoryview(raw))
    length, size = _SIZES.unpack(raw)
    head = bytearray(length)
    _exactly(sock, memoryview(head))
    return bytes(head), size


class PlainLine:
    def __init__(self, address: str, secret: bytes) -> None:
        self._sock = wire.connect(address, secret)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Reply], memoryview | None]] = deque()
        self._closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, message, *body, into=None) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting.append((future, into))
            try:
                _send(self._sock, msgspec.msgpack.encode(message), body)
            except OSError as error:
                self._fail(error)
        return future

    def _read(self) -> None:
        try:
            while True:
                head, size = _head(self._sock)
                future, into = self._waiting.popleft()
                body = into if into is not None and size == len(into) else memoryview(bytearray(size))
                _exactly(self._sock, body)
                message = _REPLIES.decode(head)
                if isinstance(message, Refusal):
                    future.set_exception(ValueError(message.why))
                else:
                    future.set_result(Reply(message, memoryview(b"") if body is into else body))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError(str(error)))

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def serve(listening: socket.socket, secret: bytes, shelf: Shelf) -> None:
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=_serve_one, args=(sock, secret, shelf), daemon=True).start()


def _serve_one(sock: socket.socket, secret: bytes, shelf: Shelf) -> None:
    try:
        if not wire.admit(sock, secret):
            return
        while True:
            head, size = _head(sock)
            body = bytearray(size)
            _exactly(sock, memoryview(body))
            try:
                reply, buffers = shelf.handle(_CALLS.decode(head), memoryview(body))
            except ValueError as error:
                reply, buffers = Refusal(str(error)), ()
            _send(sock, msgspec.msgpack.encode(reply), buffers)
    except OSError:
        return
    finally:
        sock.close()
