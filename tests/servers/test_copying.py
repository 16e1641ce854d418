"""A primary and what it says to its backups, word by word: the answers are the test's to give."""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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


def placed(number: int, holders: list[int]) -> Placed:
    addresses = {server: str(server) for server in range(2)}
    since, filled = [1] * len(holders), holders[1:]
    return Placed(number, [holders] * FRAGMENTS, [since] * FRAGMENTS, [filled] * FRAGMENTS, addresses)


def pushed(layout: int, fragment: int) -> Asked:
    return Asked(layout, Pushes([fragment], 0, 1, Push("w", "float64", (1,), "assign")))


def reply(message: Any) -> Reply:
    return Reply(message, memoryview(b""))


def test_a_copy_that_is_refused_leaves_alone_what_others_say_by_the_next_layout() -> None:
    """They would take that for a lost backup, and wait for a layout without it."""
    lines: list[OpenLine] = []
    said: queue.SimpleQueue[Said] = queue.SimpleQueue()

    def dial(address: str) -> OpenLine:
        lines.append(OpenLine(said))
        return lines[-1]

    shelf = KeyShelf(0, dial)
    shelf.rearrange(placed(1, [0, 1]))
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(shelf.handle, pushed(1, 0), memoryview(bytearray(8)))
            _, refused = said.get(timeout=PATIENCE_S)
            shelf.rearrange(placed(2, [0, 1]))
            second = pool.submit(shelf.handle, pushed(2, 1), memoryview(bytearray(8)))
            _, waiting = said.get(timeout=PATIENCE_S)
            refused.set_result(reply(Moved()))
            copy, again = said.get(timeout=PATIENCE_S)
            assert (copy.layout, copy.said.fragments) == (2, [0])
            assert len(lines) == 1 and not waiting.done()
            for call in (again, waiting):
                call.set_result(reply(Done()))
            answers = [each.result(PATIENCE_S) for each in (first, second)]
            assert [message for message, *_ in answers] == [Pushed(1), Pushed(1)]
        finally:
            shelf.rearrange(placed(1 << 30, [1]))
            for line in lines:
                line.close()
