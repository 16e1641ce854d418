"""Light members: they speak a worker's protocol to the coordinator and do nothing else. One selector, no threads."""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from paceline.wires import messages, wire
from paceline.wires.board import Board
from paceline.wires.connection import Connection
from paceline.wires.handshake import NONCE_BYTES, Knock, Verdict

_LOOK_S = 0.005
_PATIENCE_S = 60.0


def raise_descriptors() -> None:
    """A member costs the coordinator three: its connection, its pidfd, and the one kept for the standby."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Member:
    """One connection: the handshake, then messages. It never waits."""

    def __init__(self, worker: int, sock: socket.socket, secret: bytes) -> None:
        self.worker, self._socket = worker, sock
        self._knock: Knock | None = Knock(secret, secrets.token_bytes(NONCE_BYTES))
        self._socket.send(self._knock.greeting)
        self.connection = Connection(sock, messages.ANY)

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_ready(self) -> list[tuple[Any, list[int]]]:
        """The messages that have come; none during the handshake, at whose end it says hello."""
        if self._knock is None:
            found = [(message, fds) for message, fds in self.connection.receive()]
            if self.connection.ended is not None:
                raise ConnectionError(f"member {self.worker}: {self.connection.ended.why}")
            return found
        data = self._socket.recv(self._knock.wanted)
        move = self._knock.feed(data)
        if not data or move.verdict is Verdict.REFUSED:
            raise ConnectionError(f"member {self.worker} was not let in: {move.why}")
        if move.reply:
            self._socket.send(move.reply)
        if move.verdict is Verdict.ADMITTED:
            self._knock = None
            self.connection.send(messages.Hello(self.worker, os.getpid()))
        return []


class Members:
    def __init__(self, address: str, secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._selector = selectors.DefaultSelector()
        self.of: dict[int, Member] = {}
        self._answers: dict[int, Any] = {}
        self.board: Board | None = None
        self.longest_silence_s = 0.0

    def join(self, workers: Iterable[int]) -> None:
        """Connect them all at once, as far as the coordinator's door has room; until each is welcome."""
        missing, fresh = list(workers), []
        while missing:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                sock.connect("\0" + self._address)
            except BlockingIOError:  # the kernel's queue is full
                sock.close()
                self._turn()
                continue
            member = Member(missing.pop(0), sock, self._secret)
            self.of[member.worker] = member
            fresh.append(member.worker)
            self._selector.register(member, selectors.EVENT_READ, member)
        self.answers(fresh)

    def leave(self, worker: int) -> None:
        """As the kernel closes the sockets of a process that was killed."""
        member = self.of.pop(worker)
        self._selector.unregister(member)
        member.connection.close()

    def ask(self, workers: Iterable[int], question: msgspec.Struct) -> None:
        for worker in workers:
            self.of[worker].connection.send(question)

    def answers(self, workers: Iterable[int]) -> list[Any]:
        """One answer of each, once all have come."""
        wanted, deadline = set(workers), time.monotonic() + _PATIENCE_S
        while not wanted <= self._answers.keys():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(wanted - self._answers.keys())} of {len(wanted)} have no answer")
            self._turn()
        return [self._answers.pop(worker) for worker in wanted]

    def wait_for_burial(self, worker: int) -> None:
        """Until the board says that this one is dead: so a worker finds out that it waits in vain."""
        assert self.board is not None
        while not self.board.gone(worker):
            time.sleep(0.0005)
            self._look()

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_LOOK_S):
            for message, fds in key.data.on_ready():
                self._take(key.data.worker, message, fds)
        self._look()

    def _take(self, worker: int, message: Any, fds: list[int]) -> None:
        if self.board is None and isinstance(message, messages.Welcome):
            self.board = Board(os.dup(fds[0]), message.rows)
        wire.close_all(fds)
        if isinstance(message, messages.Refused):
            raise ConnectionError(f"member {worker}: {message.why}")
        self._answers[worker] = message

    def _look(self) -> None:
        if self.board is not None:
            self.longest_silence_s = max(self.longest_silence_s, self.board.silence_s)
