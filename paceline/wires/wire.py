"""How the processes of a run talk: framed msgspec structs over a socket.

On one machine the socket is a Unix one in Linux's abstract namespace: it leaves no file, and two runs
never collide. Before a message is parsed both sides have shown that they know the run's secret
(`handshake`), and on a Unix socket that they are the same user. A message is a struct behind its length;
descriptors travel beside it. What is here blocks, for workers and simple tools; who serves many uses
`door` and `connection`. None of this is on the path of a step. No torch in here.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import time
from typing import Any

import msgspec

from paceline.wires.handshake import NONCE_BYTES, Gate, Knock, Verdict
from paceline.wires.handshake import SECRET_BYTES as SECRET_BYTES

LENGTH = struct.Struct("<I")
LARGEST = 16 << 20
"""No message is longer, in bytes."""
MOST_DESCRIPTORS = 4
"""No message has more beside it."""
HANDSHAKE_S = 5.0
"""A visitor that has not proved itself by then is sent away."""
CONNECT_S = 30.0
"""How long one who knocks waits: an agent under a flood of strangers takes its time."""
_PEER = struct.Struct("3i")
_BACKLOG = 128
_encoder = msgspec.msgpack.Encoder()

Decoder = msgspec.msgpack.Decoder[Any]
"""Says which messages may come: `decoder(Hello | Done)`."""


def decoder(messages: Any) -> Decoder:
    return msgspec.msgpack.Decoder(type=messages)


class ConnectionClosed(ConnectionError):
    """The other side went away, or must be sent away."""


# messages


def encode(message: msgspec.Struct) -> bytes:
    """The message as it goes over the wire."""
    payload = _encoder.encode(message)
    if len(payload) > LARGEST:
        raise ValueError(f"a message of {len(payload)} bytes is over the limit of {LARGEST}")
    return LENGTH.pack(len(payload)) + payload


def decode(payload: bytes | bytearray | memoryview, expected: Decoder) -> Any:
    """The message; nonsense is a ValueError, whatever it is."""
    try:
        return expected.decode(payload)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            usable = len(raw) - len(raw) % 4
            found.extend(struct.unpack(f"{usable // 4}i", raw[:usable]))
    return found


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


ROOM_FOR_DESCRIPTORS = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
"""The kernel closes what does not fit."""


def send(sock: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    data = encode(message)
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket, expected: Decoder) -> tuple[Any, list[int]]:
    fds: list[int] = []
    try:
        (length,) = LENGTH.unpack(_receive_exactly(sock, LENGTH.size, fds))
        if length > LARGEST:
            raise ConnectionClosed(f"a message of {length} bytes is over the limit")
        message = decode(_receive_exactly(sock, length, fds), expected)
    except BaseException:
        close_all(fds)
        raise
    return message, fds


def _receive_exactly(sock: socket.socket, count: int, fds: list[int]) -> bytes:
    data = bytearray()
    by_unix = sock.family == socket.AF_UNIX
    while len(data) < count:
        if by_unix:
            chunk, ancillary, _, _ = sock.recvmsg(count - len(data), ROOM_FOR_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            fds.extend(descriptors_in(ancillary))
            if len(fds) > MOST_DESCRIPTORS:
                raise ConnectionClosed(f"a message with more than {MOST_DESCRIPTORS} descriptors")
        else:
            chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionClosed("the other side closed the connection")
        data += chunk
    return bytes(data)


# who may speak


def listen(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server.bind("\0" + address)
    except OSError:
        server.close()
        raise
    server.listen(_BACKLOG)
    return server


def listen_tcp(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """For other machines, if the host is not a loopback address; 0 is a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The pid and the user at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_our_user(sock: socket.socket) -> bool:
    return sock.family != socket.AF_UNIX or peer_of(sock)[1] == os.getuid()


def admit(sock: socket.socket, secret: bytes, binding: bytes = b"") -> bool:
    """Whether this fresh connection is our own user's and knows the secret; we prove that we know it too."""
    gate = Gate(secret, secrets.token_bytes(NONCE_BYTES), binding)
    try:
        return is_our_user(sock) and _shake(sock, gate, HANDSHAKE_S) == ""
    except OSError:
        return False


def _shake(sock: socket.socket, side: Gate | Knock, patience_s: float) -> str:
    """Go through the handshake; why it failed, or nothing. The socket's own timeout counts if it is shorter."""
    before = sock.gettimeout()
    deadline = time.monotonic() + min(patience_s, before or patience_s)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "it did not prove itself in time"
            sock.settimeout(left)
            # recv and not recvmsg: the kernel closes descriptors that nobody asks for
            data = sock.recv(side.wanted)
            if not data:
                return "it went away in the middle of the handshake"
            move = side.feed(data)
            if move.reply:
                sock.sendall(move.reply)
            if move.verdict is not Verdict.OPEN:
                return move.why
    finally:
        sock.settimeout(before)


def tcp_address(host: str, port: int) -> str:
    """What `connect` is given: between machines with TLS.

    >>> tcp_address("10.0.0.7", 7070), tcp_address("127.0.0.1", 7070)
    ('tls://10.0.0.7:7070', 'tcp://127.0.0.1:7070')
    """
    return f"{'tcp' if is_loopback(host) else 'tls'}://{f'[{host}]' if ':' in host else host}:{port}"


def connect(address: str, secret: bytes, patience_s: float = CONNECT_S) -> socket.socket:
    """A connection on which both sides have proved themselves.

    The address is what `listen` was given, or for another machine tls://host:port, or tcp://host:port
    if it is a loopback one.
    """
    scheme, _, place = address.rpartition("://")
    if scheme:
        host, _, port = place.rpartition(":")
        return connect_tcp(host.strip("[]"), int(port), secret, tls=scheme == "tls", patience_s=patience_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Blocking, with the kernel's own limit: with Python's a full backlog would be an error at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CONNECT_S), 0))
        sock.connect("\0" + address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        if not is_our_user(sock):
            raise ConnectionClosed(f"{address}: another user listens there")
        _knock(sock, address, secret, b"", patience_s)
    except BaseException:
        sock.close()
        raise
    return sock


def connect_tcp(host: str, port: int, secret: bytes, tls: bool, patience_s: float = CONNECT_S) -> socket.socket:
    """The same to another machine. Without TLS only to our own: the handshake hides nothing said after it."""
    sock = socket.create_connection((host, port), patience_s)
    try:
        if not tls and not is_loopback(sock.getpeername()[0]):
            raise ConnectionClosed(f"{host} is another machine: TLS is needed")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        binding = b""
        if tls:
            from paceline.wires.tls import secure  # costs some ms, and most runs have one machine

            sock, binding = secure(sock)
        _knock(sock, f"{host}:{port}", secret, binding, patience_s)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _knock(sock: socket.socket, address: str, secret: bytes, binding: bytes, patience_s: float) -> None:
    side = Knock(secret, secrets.token_bytes(NONCE_BYTES), binding)
    sock.sendall(side.greeting)
    why = _shake(sock, side, patience_s)
    if why:
        raise ConnectionClosed(f"{address}: the handshake failed: {why}")
