"""The run's servers, as a worker sees them: which one holds what.

When a server is lost, or fragments have moved, whoever is waiting finds
out by `MovedError`, gets the next layout, and says it all again: servers ignore what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol, TypeVar

import msgspec

from paceline.cluster.messages import Placed
from paceline.servers.calling import Reply
from paceline.servers.lines import Server, moved
from paceline.servers.messages import Asked, Drawing, Outline

_LOOK_S = 0.01
NOWHERE = Placed(0, [], [], [], {})
Check = Callable[[float], None]
Result = TypeVar("Result")


class MovedError(Exception):
    """A server is gone, or is not the primary of a fragment any more."""


class Directory(Protocol):
    def size(self, nbytes: list[int]) -> None:
        """Say how large the fragments are."""

    def layout(self, after: int) -> Placed:
        """The next layout, once there is one."""

    def dial(self, address: str) -> Server: ...


class Holders:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._servers: dict[int, Server] = {}
        self._layout = NOWHERE

    def place(self, drawing: Drawing, nbytes: list[int]) -> None:
        self._drawn = memoryview(msgspec.msgpack.encode(drawing))
        self._directory.size(nbytes)
        self._refresh()

    def _refresh(self) -> None:
        self._layout = self._directory.layout(self._layout.number)
        for server in [k for k in self._servers if k not in self._layout.addresses]:
            self._servers.pop(server).close()

    def through(self, operation: Callable[[], Result]) -> Result:
        """What comes of an operation that is repeated as often as fragments move in it."""
        while True:
            try:
                return operation()
            except MovedError:
                self._refresh()

    def _server(self, number: int) -> Server:
        if number not in self._servers:
            try:
                server = self._directory.dial(self._layout.addresses[number])
            except OSError as error:
                raise MovedError(str(error)) from None
            self._servers[number] = server
            for line in server:
                line.call(Outline(), self._drawn)
        return self._servers[number]

    # calls

    def out(self, fragment: int, message: msgspec.Struct, *body: memoryview) -> Future[Reply]:
        return self._server(self._layout.holders[fragment][0]).out.call(self._asked(message), *body)

    def back(self, fragment: int, message: msgspec.Struct, into: memoryview | None = None) -> Future[Reply]:
        return self._server(self._layout.holders[fragment][0]).back.call(self._asked(message), into=into)

    def _asked(self, message: msgspec.Struct) -> Asked:
        return Asked(self._layout.number, message)  # type: ignore[arg-type]

    def each(self) -> Iterator[tuple[int, list[int]]]:
        """One fragment of each server, and all of which it is the primary."""
        of: dict[int, list[int]] = {}
        for fragment, holders in enumerate(self._layout.holders):
            of.setdefault(holders[0], []).append(fragment)
        for fragments in of.values():
            yield fragments[0], fragments

    def wait(self, futures: Iterable[Future[Reply]], check: Check = lambda seconds: None) -> list[Reply]:
        """All answers; `check` is called meanwhile, with the seconds so far, and may raise."""
        pending, waited = list(futures), 0.0
        while wait_for(pending, _LOOK_S).not_done:
            waited += _LOOK_S
            check(waited)
        try:
            replies = [future.result() for future in pending]
        except OSError as error:
            raise MovedError(str(error)) from None
        if any(moved(reply) for reply in replies):
            raise MovedError
        return replies

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers = {}
