"""Both ends of a channel by every carrier, for tests; and a peer that is a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from paceline.tensors import sharing
from paceline.tensors.channel import Channel, pair
from paceline.tensors.sharing import SharedChannel
from paceline.tensors.streamed import StreamChannel
from paceline.wires import tls

SMALL_RING, SMALL_CHUNK = 64 << 10, 4 << 10
PATIENCE_S = 30.0


def unix_sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@cache
def _identity() -> tls.Identity:
    return tls.Identity.make()


def tls_sockets() -> tuple[socket.socket, socket.socket]:
    one, other = tcp_sockets()
    wrapped = _identity().wrap(other)
    served = threading.Thread(target=wrapped.do_handshake)  # type: ignore[attr-defined]
    served.start()
    secured, _ = tls.secure(one)
    served.join()
    return secured, wrapped


def shared(size: int, chunk: int) -> tuple[SharedChannel, SharedChannel]:
    one, other = unix_sockets()
    return sharing.offer(one, size, chunk), sharing.accept(other)


def _streamed(sockets: Callable[[], tuple[socket.socket, socket.socket]]) -> Callable[[], tuple[Channel, Channel]]:
    def make() -> tuple[Channel, Channel]:
        one, other = sockets()
        return StreamChannel(one), StreamChannel(other)

    return make


CARRIERS: dict[str, Callable[[], tuple[Channel, Channel]]] = {
    "paired": pair,
    "unix": _streamed(unix_sockets),
    "tcp": _streamed(tcp_sockets),
    "tls": _streamed(tls_sockets),
    "shared": lambda: shared(sharing.RING, sharing.CHUNK),
    "small ring": lambda: shared(SMALL_RING, SMALL_CHUNK),
}
BETWEEN_PROCESSES = ["unix", "tcp", "shared", "small ring"]


@contextlib.contextmanager
def thread(work: Callable[..., Any], *arguments: Any) -> Iterator[list[Any]]:
    """Runs it beside the block and joins it; the list has what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work(*arguments))
        except Exception as error:  # noqa: BLE001  looked at by the test
            outcome.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    yield outcome
    worker.join(PATIENCE_S)
    assert not worker.is_alive(), "it did not end"


class Peer:
    """The other end, in a process forked for it."""

    def __init__(self, carrier: str, work: Callable[[Channel], None]) -> None:
        self.channel, theirs = CARRIERS[carrier]()
        self._pid = os.fork()
        if not self._pid:
            code = 1
            try:
                # Close, not hang up: that would end it for both processes.
                _close_descriptors(self.channel)
                work(theirs)
                code = 0
            finally:
                os._exit(code)
        _close_descriptors(theirs)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> int:
        """Its exit code."""
        self.channel.close()
        code = os.waitpid(self._pid, 0)[1]
        return os.waitstatus_to_exitcode(code)


def _close_descriptors(channel: Channel) -> None:
    for name in ("_socket", "_returns"):
        if hasattr(channel, name):
            getattr(channel, name).close()
