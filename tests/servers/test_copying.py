"""A primary and what it says to its backups, word by word: the answers are the test's to give."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from paceline.cluster.messages import Placed
from paceline.servers.calling import Reply
from paceline.servers.keys_messages import Pushes
from paceline.servers.keys_shelf import KeyShelf
from paceline.servers.kv import Push, Pushed
from paceline.servers.messages import Asked, Copy, Done, Moved
from tests.servers.shelves import PATIENCE_S

FRAGMENTS = 2
Said = tuple[Copy, "Future[Reply]"]


class OpenLine:
    def __init__(self, said: queue.SimpleQueue[Said]) -> None:
        self._said = said
        self._calls: list[Future[Reply]] = []

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        self._calls.append(future)
        self._said.put((message, future))
        return future

    def close(self) -> None:
        for future in self._calls:
            if not future.done():
                future.set_exception(ConnectionError("the line is cut"))


class Primary:
    """Server 0, by the first layout, with server 1 for its backup."""

    def __init__(self) -> None:
        self.lines: list[OpenLine] = []
        self.said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.shelf = KeyShelf(0, self._dial)
        self.shelf.rearrange(placed(1, [0, 1]))
        self._pool = ThreadPoolExecutor(2)

    def _dial(self, address: str) -> OpenLine:
        self.lines.append(OpenLine(self.said))
        return self.lines[-1]

    def push(self, layout: int, fragment: int) -> tuple[Future[Any], Said]:
        """What a worker is answered, and what the backup is told first."""
        call = Asked(layout, Pushes([fragment], 0, 1, Push("w", "float64", (1,), "assign")))
        return self._pool.submit(self.shelf.handle, call, memoryview(bytearray(8))), self.said.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.shelf.rearrange(placed(1 << 30, [1]))
        for line in self.lines:
            line.close()
        self._pool.shutdown()


@pytest.fixture
def primary() -> Iterator[Primary]:
    made = Primary()
    yield made
    made.close()


def placed(number: int, holders: list[int], since: int = 1) -> Placed:
    """`since` when server 0 holds what it holds."""
    addresses = {server: str(server) for server in range(2)}
    held, filled = [1 if server else since for server in holders], holders[1:]
    return Placed(number, [holders] * FRAGMENTS, [held] * FRAGMENTS, [filled] * FRAGMENTS, addresses)


def reply(message: Any) -> Reply:
    return Reply(message, memoryview(b""))


def test_a_copy_that_is_refused_leaves_alone_what_others_say_by_the_next_layout(primary: Primary) -> None:
    """They would take that for a lost backup, and wait for a layout without it."""
    first, (_, refused) = primary.push(1, 0)
    primary.shelf.rearrange(placed(2, [0, 1]))
    second, (_, waiting) = primary.push(2, 1)
    refused.set_result(reply(Moved()))
    copy, again = primary.said.get(timeout=PATIENCE_S)
    assert (copy.layout, copy.said.fragments) == (2, [0])
    assert len(primary.lines) == 1 and not waiting.done()
    for call in (again, waiting):
        call.set_result(reply(Done()))
    assert [each.result(PATIENCE_S)[0] for each in (first, second)] == [Pushed(1), Pushed(1)]


def test_what_was_done_to_a_copy_that_was_dropped_meanwhile_is_not_answered(primary: Primary) -> None:
    """It is the primary again by then, of what it was filled with; a worker that was answered would not say it again."""
    answer, (_, told) = primary.push(1, 0)
    primary.shelf.rearrange(placed(2, [1]))
    primary.shelf.rearrange(placed(3, [1, 0], since=3))
    primary.shelf.rearrange(placed(4, [0, 1], since=3))
    told.set_result(reply(Done()))
    assert answer.result(PATIENCE_S)[0] == Moved()
