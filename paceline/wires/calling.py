"""The side that calls another worker's `Listener`, without waiting for it.

`call` is a generator: it says what it waits for, is resumed when that has come, and returns the
connection in the end. Who drives it can look after other things meanwhile, and drop it. No torch in here.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import ssl
from collections.abc import Generator

import msgspec

from paceline.wires import wire
from paceline.wires.handshake import NONCE_BYTES, Knock, Verdict

Want = tuple[int, int]
"""A descriptor, and the events of `poll` that are waited for on it."""
_IDLE_S, _PROBE_S, _GIVE_UP_S = 30, 15, 120
"""A connection outlives a cable that is cut for less than the last one, busy or idle."""


def tune(sock: socket.socket) -> None:
    """For tensors between workers. Buffers stay the kernel's affair: one that was set no longer grows
    with the link, and may be capped far below what the kernel would give by itself."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_S * 1000)


def call(address: str, secret: bytes, label: msgspec.Struct) -> Generator[Want, None, socket.socket]:
    """A connection on which both sides have proved themselves and the label is on its way; it does not block.

    Raises OSError if it does not come to that. Closing the generator closes the connection.
    """
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        yield from _connect(sock, where)
        if scheme != "tls" and not wire.is_loopback(sock.getpeername()[0]):
            raise wire.ConnectionClosed(f"{host} is another machine: TLS is needed")
        tune(sock)
        binding = b""
        if scheme == "tls":
            from paceline.wires import tls  # costs some ms, and most runs have one machine

            sock = wrapped = tls.begin(sock)
            yield from _agree(wrapped)
            binding = tls.binding_of(wrapped)
        yield from _prove(sock, Knock(secret, secrets.token_bytes(NONCE_BYTES), binding))
        _say(sock, wire.encode(label))
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, where: object) -> Generator[Want, None, None]:
    code = sock.connect_ex(where)  # type: ignore[arg-type]
    if code == errno.EINPROGRESS:
        yield sock.fileno(), select.POLLOUT
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _agree(sock: ssl.SSLSocket) -> Generator[Want, None, None]:
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            yield sock.fileno(), select.POLLIN
        except ssl.SSLWantWriteError:
            yield sock.fileno(), select.POLLOUT


def _prove(sock: socket.socket, side: Knock) -> Generator[Want, None, None]:
    _say(sock, side.greeting)
    while True:
        try:
            data = sock.recv(side.wanted)
        except BlockingIOError:
            yield sock.fileno(), select.POLLIN
            continue
        if not data:
            raise wire.ConnectionClosed("it went away in the middle of the handshake")
        move = side.feed(data)
        _say(sock, move.reply)
        if move.verdict is Verdict.REFUSED:
            raise wire.ConnectionClosed(f"the handshake failed: {move.why}")
        if move.verdict is Verdict.ADMITTED:
            return


def _say(sock: socket.socket, words: bytes) -> None:
    """A few bytes, for which a connection that carries nothing yet always has room."""
    if words and sock.send(words) < len(words):
        raise wire.ConnectionClosed("it takes nothing")
