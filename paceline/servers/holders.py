"""The run's servers, as a worker sees them: which one holds what.

When a server is lost, or fragments have moved, whoever is waiting finds out by `MovedError`, gets the next layout, and
says it all again: servers ignore what they know. A line that breaks says nothing about its server: that is called again, and
only if it cannot be reached is there another layout to wait for. Fragments of one server travel together, as long as they
are small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import Protocol, TypeVar

import msgspec

from paceline.servers.calling import Reply
from paceline.servers.fragments import MOST_BYTES
from paceline.servers.lines import Server, before_redial, moved
from paceline.servers.messages import Asked, Drawing, Outline
from paceline.wires.messages import Placed

_LOOK_S = 0.01
NOWHERE = Placed(0, [], [], [], {})
Check = Callable[[float], None]
Stretch = Callable[[int], memoryview]
"""A fragment's bytes in this worker's memory."""
Result = TypeVar("Result")


class MovedError(Exception):
    """A server is gone, or is not the primary of a fragment any more; or its line has broken."""


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
        self.moves = 0
        """How often something has moved, or a line has broken: what was said before may not have been heard."""
        self.sent = self.moved = 0
        """Bytes of bodies that went out; of these and those that came back."""

    def place(self, drawing: Drawing, nbytes: list[int]) -> None:
        self._drawn, self._nbytes = memoryview(msgspec.msgpack.encode(drawing)), nbytes
        self._params = range(len(drawing.fragments))
        self._directory.size(nbytes)
        self._refresh()

    def _refresh(self) -> None:
        self._layout = self._directory.layout(self._layout.number)
        self.moves += 1
        self._hang_up(k for k in self._servers if k not in self._layout.addresses)

    def _hang_up(self, servers: Iterable[int]) -> bool:
        """Whether there was one among them. Nothing that is still on its way is written anywhere from here on."""
        gone = list(servers)
        for server in gone:
            self._servers.pop(server).close()
        return bool(gone)

    def through(self, operation: Callable[[], Result]) -> Result:
        """What comes of an operation that is repeated as often as fragments move in it."""
        while True:
            try:
                return operation()
            except MovedError:
                if self._hang_up(k for k, server in self._servers.items() if server.over):
                    self.moves += 1
                    before_redial()
                else:
                    self._refresh()

    def of_each(self, among: Iterable[int] | None = None) -> list[list[int]]:
        """The fragments of each server that is their primary: of parameters, or of those that are named."""
        of: dict[int, list[int]] = {}
        for fragment in self._params if among is None else among:
            of.setdefault(self._layout.holders[fragment][0], []).append(fragment)
        return list(of.values())

    def batches(self, fragments: Iterable[int], most: int = MOST_BYTES) -> Iterator[list[int]]:
        """Those that go to one server in one call, of so many bytes at most."""
        wanted = set(fragments)
        for mine in self.of_each():
            batch: list[int] = []
            size = 0
            for fragment in mine:
                if fragment not in wanted:
                    continue
                if batch and size + self._nbytes[fragment] > most:
                    yield batch
                    batch, size = [], 0
                batch.append(fragment)
                size += self._nbytes[fragment]
            if batch:
                yield batch

    # calls

    def out(self, batch: Sequence[int], message: msgspec.Struct, *body: memoryview) -> Future[Reply]:
        self._count(body)
        return self._server(batch).out.call(self._asked(message), *body)

    def back(
        self, batch: Sequence[int], message: msgspec.Struct, *body: memoryview, into: memoryview | None = None
    ) -> Future[Reply]:
        self._count(body)
        return self._server(batch).back.call(self._asked(message), *body, into=into)

    def _count(self, body: Sequence[memoryview]) -> None:
        size = sum(map(len, body))
        self.sent += size
        self.moved += size

    def _server(self, batch: Sequence[int]) -> Server:
        number = self._layout.holders[batch[0]][0]
        if number not in self._servers:
            try:
                server = self._directory.dial(self._layout.addresses[number])
            except OSError as error:
                raise MovedError(str(error)) from None
            self._servers[number] = server
            for line in server:
                line.call(Outline(), self._drawn)
        return self._servers[number]

    def _asked(self, message: msgspec.Struct) -> Asked:
        return Asked(self._layout.number, message)  # type: ignore[arg-type]

    def begin_fetch(
        self, fragments: Iterable[int], ask: Callable[[list[int]], msgspec.Struct], to: Stretch
    ) -> list[Future[Reply]]:
        """Fragments that lie alone in their call are read straight to where they belong; the rest is spread by
        `end_fetch`."""
        self._fetching = [
            (batch, self.back(batch, ask(batch), into=to(batch[0]) if len(batch) == 1 else None))
            for batch in self.batches(fragments)
        ]
        self._to = to
        return [future for _, future in self._fetching]

    def end_fetch(self) -> None:
        for batch, future in self._fetching:
            body, at = future.result().body, 0
            for fragment in batch if len(batch) > 1 else []:
                size = self._nbytes[fragment]
                self._to(fragment)[:] = body[at : at + size]
                at += size

    def wait(self, futures: Iterable[Future[Reply]], check: Check = lambda seconds: None) -> list[Reply]:
        """All answers; `check` is called meanwhile, with the seconds so far, and may raise."""
        asked = list(futures)
        pending, begun, told = set(asked), time.monotonic(), 0.0
        while pending:
            done, pending = wait_for(pending, _LOOK_S, FIRST_COMPLETED)
            for future in done:  # at once: the rest may be waiting for what was refused here
                _look_at(future)
            waited = time.monotonic() - begun
            if pending and waited - told >= _LOOK_S:
                told = waited
                if any(server.over for server in self._servers.values()):
                    raise MovedError("a line has broken")  # what is waited for may need what was said on it
                check(waited)
        replies = [future.result() for future in asked]
        self.moved += sum(len(reply.body) for reply in replies)
        return replies

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers = {}


def _look_at(future: Future[Reply]) -> None:
    try:
        if moved(future.result()):
            raise MovedError
    except OSError as error:
        raise MovedError(str(error)) from None
