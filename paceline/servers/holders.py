"""The run's servers, as a worker sees them: which one holds what, and two lines to each.

Gradients leave by one line and values come by the other: a call that waits at the server holds up what was
said behind it on its own line only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple, Protocol

import msgspec

from paceline.servers.messages import Call, Done, Outline

_LOOK_S = 0.01
Check = Callable[[float], None]


class Reply(NamedTuple):
    message: msgspec.Struct
    body: memoryview
    """Nothing, if it went into memory that was given."""

    @property
    def yes(self) -> bool:
        return isinstance(self.message, Done) and self.message.yes


class Line(Protocol):
    """Calls go out in order, and are answered in order."""

    def call(self, message: Call, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        """`into` takes the answer's bytes."""

    def close(self) -> None: ...


class Server(Protocol):
    out: Line
    back: Line


class Holders:
    """`check` is called while waiting, with the seconds so far, and may raise."""

    def __init__(self, servers: Sequence[Server], check: Check) -> None:
        self._servers, self._check = servers, check
        self._of: list[Server] = []

    @property
    def count(self) -> int:
        return len(self._servers)

    def place(self, outline: Outline, homes: Sequence[int]) -> None:
        """Fragment k lies at the server homes[k]."""
        self._of = [self._servers[home] for home in homes]
        self.wait(server.out.call(outline) for server in self._servers)

    def of(self, fragment: int) -> Server:
        return self._of[fragment]

    def each(self) -> Iterable[tuple[Server, list[int]]]:
        """Every server with its fragments."""
        for server in self._servers:
            mine = [k for k, holder in enumerate(self._of) if holder is server]
            if mine:
                yield server, mine

    def wait(self, futures: Iterable[Future[Reply]], check: Check | None = None) -> list[Reply]:
        """All answers."""
        pending, check = list(futures), check or self._check
        waited = 0.0
        while wait_for(pending, _LOOK_S).not_done:
            waited += _LOOK_S
            check(waited)
        return [future.result() for future in pending]

    def close(self) -> None:
        for server in self._servers:
            server.out.close()
            server.back.close()
