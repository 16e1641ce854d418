"""How the processes of a run talk: framed msgspec structs over a Unix socket.

The socket lives in Linux's abstract namespace: it leaves no file, and two runs never collide. Before
a message is parsed the peer must be the same user and must have sent the run's secret. A message is a
struct behind its length; descriptors travel beside it. None of this is on the path of a step. No torch
in here.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from typing import Any

import msgspec

SECRET_BYTES = 32
_LENGTH = struct.Struct("<I")
_LARGEST = 16 << 20
_encoder = msgspec.msgpack.Encoder()

Decoder = msgspec.msgpack.Decoder[Any]
"""Says which messages may come: `decoder(Hello | Done)`."""


def decoder(messages: Any) -> Decoder:
    return msgspec.msgpack.Decoder(type=messages)


class ConnectionClosed(ConnectionError):
    """The other side went away."""


def _receive_exactly(sock: socket.socket, count: int, fds: list[int]) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk, ancillary, _, _ = sock.recvmsg(count - len(data), socket.CMSG_SPACE(4 * 4))
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                usable = len(raw) - len(raw) % 4
                fds.extend(struct.unpack(f"{usable // 4}i", raw[:usable]))
        if not chunk:
            raise ConnectionClosed("the other side closed the connection")
        data += chunk
    return bytes(data)


def send(sock: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    payload = _encoder.encode(message)
    data = _LENGTH.pack(len(payload)) + payload
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket, expected: Decoder) -> tuple[Any, list[int]]:
    fds: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, fds))
        if length > _LARGEST:
            raise ConnectionClosed(f"a message of {length} bytes is over the limit")
        message = expected.decode(_receive_exactly(sock, length, fds))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for fd in fds:
        os.set_inheritable(fd, False)
    return message, fds


def listen(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server.bind("\0" + address)
    except OSError:
        server.close()
        raise
    server.listen(64)
    return server


def admit(sock: socket.socket, secret: bytes) -> bool:
    """Whether this fresh connection is our own user's and knows the secret."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        return False
    fds: list[int] = []
    try:
        given = _receive_exactly(sock, SECRET_BYTES, fds)
    except OSError:
        return False
    finally:
        for fd in fds:
            os.close(fd)
    return hmac.compare_digest(given, secret)


class Link:
    """The side that asks: one request at a time."""

    def __init__(self, address: str, secret: bytes, expected: Decoder) -> None:
        self._expected = expected
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect("\0" + address)
            self._socket.sendall(secret)
        except OSError:
            self._socket.close()
            raise

    def ask(self, message: msgspec.Struct) -> tuple[Any, list[int]]:
        send(self._socket, message)
        return receive(self._socket, self._expected)

    def tell(self, message: msgspec.Struct) -> None:
        """Say it if anybody listens: an agent that died must not end the training."""
        try:
            self.ask(message)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()
