"""Those who come to a door in the tests, and the loop of one who serves it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

from paceline.wires import wire
from paceline.wires.door import Arrival, Door
from paceline.wires.handshake import GREETING_BYTES, NONCE_BYTES, SECRET_BYTES, Knock

SECRET = bytes(range(SECRET_BYTES))
PATIENCE_S = 20.0


def stranger(address: str) -> socket.socket:
    """A raw connection to an abstract Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect("\0" + address)
    return sock


def greeting(nonce: bytes = bytes(NONCE_BYTES)) -> bytes:
    return Knock(SECRET, nonce).greeting


def hung_up(sock: socket.socket) -> bool:
    """The other side closes, and has said at most its greeting. Waits for it."""
    said = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while piece := sock.recv(1000):
            said += piece
    return len(said) <= GREETING_BYTES


def serve(door: Door, until: int) -> list[Arrival]:
    """Turn the door's loop until so many have come in."""
    arrivals: list[Arrival] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(arrivals) < until:
        assert time.monotonic() < deadline, f"{len(arrivals)} of {until} came in: {door.refusals.counts}"
        select.select([door], [], [], 0.01)
        arrivals += door.on_ready(time.monotonic())
        door.expire(time.monotonic())
    return arrivals


def serve_refusals(door: Door, until: int) -> None:
    """Turn the door's loop until so many were refused."""
    deadline = time.monotonic() + PATIENCE_S
    while door.refusals.counts.total() < until:
        assert time.monotonic() < deadline, f"{until} should be refused: {door.refusals.counts}"
        select.select([door], [], [], 0.01)
        assert door.on_ready(time.monotonic()) == []
        door.expire(time.monotonic())


@contextlib.contextmanager
def knocking(address: str, secret: bytes = SECRET) -> Iterator[list[socket.socket]]:
    """Somebody with a secret, in a thread; the list has his connection once he is in."""
    inside: list[socket.socket] = []

    def come() -> None:
        with contextlib.suppress(OSError):
            inside.append(wire.connect(address, secret))

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield inside
    finally:
        thread.join()
        for sock in inside:
            sock.close()
