"""A line to whoever leads the run. Leaders die, freeze and are replaced; the line finds the next one.

The address of a leader ends in its fence. Every question can be asked again: a leader answers from what
the run's store says, not from what it remembers of the asker. No torch in here.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from paceline.wires import wire
from paceline.wires.messages import ANY

_POLL_MS = 100
_RETRY_S = 0.02
LAST_WORDS_S = 5.0
"""How long a worker that has failed looks for somebody to tell it to: a frozen leader is replaced after a lease."""
_AHEAD = 4
"""How many fences beyond the last known one are tried: leaders may have followed each other meanwhile."""


class NoLeaderError(ConnectionError):
    """Nobody has led the run for too long."""


class LeaderLink:
    """`greeting` is said to every leader first; `fence` tells which leader there is, as far as one knows."""

    def __init__(
        self, address: str, secret: bytes, greeting: msgspec.Struct, fence: Callable[[], int], grace_s: float
    ) -> None:
        self._address, self._secret, self._greeting, self._grace_s = address, secret, greeting, grace_s
        self._known_fence = fence
        self._socket: socket.socket | None = None
        self._fence = 0

    def greet(self) -> tuple[Any, list[int]]:
        """What the leader answers to the greeting."""
        return self._again(self.attempt, self._grace_s)

    def ask(self, message: msgspec.Struct, check: Callable[[], None] = lambda: None) -> tuple[Any, list[int]]:
        """The leader's answer, from this leader or the next; `check` is called while waiting, and may raise."""
        return self._again(lambda: self._once(message, check), self._grace_s)

    def tell(self, message: msgspec.Struct, patience_s: float) -> bool:
        """Say it if anybody listens, now or within this time; whether somebody has answered."""
        with suppress(NoLeaderError):
            self._again(lambda: self._once(message, lambda: None), patience_s)
            return True
        return False

    def _once(self, message: msgspec.Struct, check: Callable[[], None]) -> tuple[Any, list[int]]:
        if self._socket is None:
            wire.close_all(self.attempt()[1])
        return self._exchange(message, check)

    def _again(self, attempt: Callable[[], tuple[Any, list[int]]], grace_s: float) -> tuple[Any, list[int]]:
        deadline = time.monotonic() + grace_s
        while True:
            began = time.monotonic()
            try:
                return attempt()
            except OSError as error:
                if self._socket is not None:  # somebody led until now: an answer may be long in coming
                    deadline += time.monotonic() - began
                self.close()
                if time.monotonic() > deadline:
                    raise NoLeaderError(f"no agent has led the run for {grace_s:.0f} s") from error
                time.sleep(_RETRY_S)

    def attempt(self, patience_s: float = wire.CONNECT_S) -> tuple[Any, list[int]]:
        """Find the leader and greet it, now; its answer to the greeting. `patience_s`: for who comes in; one may be frozen."""
        known = self._known_fence()
        for fence in range(known, known + _AHEAD):
            try:
                self._socket = wire.connect(f"{self._address}-{fence}", self._secret, patience_s)
            except OSError:
                continue
            self._fence = fence
            return self._exchange(self._greeting, lambda: None)
        raise ConnectionError(f"no agent listens at {self._address}-{known}")

    def _exchange(self, message: msgspec.Struct, check: Callable[[], None]) -> tuple[Any, list[int]]:
        assert self._socket is not None
        wire.send(self._socket, message)
        while not self._readable():
            check()
            if self.stale:
                raise ConnectionError("another agent leads the run now")
        return wire.receive(self._socket, ANY)

    def _readable(self) -> bool:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(_POLL_MS))

    def send(self, message: msgspec.Struct) -> None:
        """Say it, and take whatever comes of it with `receive`."""
        assert self._socket is not None
        wire.send(self._socket, message)

    @property
    def peer_pid(self) -> int:
        """The leader's process."""
        assert self._socket is not None
        return wire.peer_of(self._socket)[0]

    @property
    def stale(self) -> bool:
        """Whether this is the line to a leader of the past."""
        return self._socket is not None and self._known_fence() > self._fence

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def receive(self) -> tuple[Any, list[int]]:
        """A message that the leader sends of its own accord."""
        assert self._socket is not None
        return wire.receive(self._socket, ANY)

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
