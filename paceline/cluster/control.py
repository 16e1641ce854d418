"""What a worker and its agent say to each other, over one Unix socket a worker.

The socket lives in Linux's abstract namespace: it leaves no file, and two runs never collide. Before
a message is parsed the peer must be the same user and must have sent the run's secret. Messages are
msgspec structs behind a length; descriptors of shared memory travel beside them. None of this is on
the path of a step. No torch in here.
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


class Hello(msgspec.Struct, tag=True):
    """A worker's first message; the answer is `Welcome`, with the board's descriptor."""

    worker: int
    pid: int


class Welcome(msgspec.Struct, tag=True):
    rows: int
    """Rows of the board: as many workers as there may ever be."""
    term: int
    members: list[int]
    """The view of the run. A worker that is not in it comes to join."""
    deaths: int
    """Workers lost so far."""


class Segment(msgspec.Struct, tag=True):
    """Shared memory of this name and size: made by the first who asks, the same for all."""

    name: str
    size: int


class Granted(msgspec.Struct, tag=True):
    size: int


class Put(msgspec.Struct, tag=True):
    """A fact for the other workers (an address, say)."""

    key: str
    value: str


class Get(msgspec.Struct, tag=True):
    """Answered once somebody has put the key."""

    key: str


class Value(msgspec.Struct, tag=True):
    value: str


class Ready(msgspec.Struct, tag=True):
    """A newcomer has come as far as the loop; answered by the `Next` view it is in."""

    worker: int


class Healed(msgspec.Struct, tag=True):
    """A newcomer has the run's state: its view is in force."""

    worker: int


class Next(msgspec.Struct, tag=True):
    """A view: an answer."""

    term: int
    members: list[int]
    deaths: int


class After(msgspec.Struct, tag=True):
    """The view that follows a death in this term; answered once it is known."""

    term: int


class Entering(msgspec.Struct, tag=True):
    """The view of this term, which was announced."""

    term: int


class Failed(msgspec.Struct, tag=True):
    """This worker ends because of an error."""

    summary: str
    traceback: str
    exit_code: int
    follows: bool
    """True when the cause lies elsewhere: another worker was lost, and this one only noticed."""


class Notice(msgspec.Struct, tag=True):
    """A line for the terminal that is not the script's own output."""

    text: str


class Done(msgspec.Struct, tag=True):
    """An empty answer."""


class Refused(msgspec.Struct, tag=True):
    why: str


Message = (
    Hello | Welcome | Ready | Healed | Next | After | Entering | Segment | Granted | Put | Get | Value | Failed | Notice
    | Done | Refused
)  # fmt: skip
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(type=Message)
_encoder = msgspec.msgpack.Encoder()


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


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    payload = _encoder.encode(message)
    data = _LENGTH.pack(len(payload)) + payload
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    fds: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, fds))
        if length > _LARGEST:
            raise ConnectionClosed(f"a message of {length} bytes is over the limit")
        message = _decoder.decode(_receive_exactly(sock, length, fds))
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
    """A worker's side: one request at a time, from the thread that trains."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect("\0" + address)
            self._socket.sendall(secret)
        except OSError:
            self._socket.close()
            raise

    def ask(self, message: Message) -> tuple[Message, list[int]]:
        send(self._socket, message)
        return receive(self._socket)

    def tell(self, message: Message) -> None:
        """Say it if anybody listens: an agent that died must not end the training."""
        try:
            self.ask(message)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()
