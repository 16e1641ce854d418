"""A primary and what it says to its backups, word by word: the answers are the test's to give."""

from __future__ import annotations

import queue
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from paceline.servers.calling import Reply
from paceline.servers.direct import DirectLine
from paceline.servers.keys_messages import Pulls, Pushes
from paceline.servers.keys_shelf import KeyShelf
from paceline.servers.kv import Pull, Push, Pushed
from paceline.servers.lines import REDIAL_S
from paceline.servers.messages import Asked, Copy, Done, Moved
from paceline.wires.messages import Placed
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


def test_a_backup_that_ends_every_line_at_once_is_not_called_at_full_speed(primary: Primary) -> None:
    begun = time.monotonic()
    answer, (_, told) = primary.push(1, 0)
    for _ in range(10):
        told.set_exception(ConnectionError("the line has broken"))
        _, told = primary.said.get(timeout=PATIENCE_S)
    told.set_result(reply(Done()))
    assert answer.result(PATIENCE_S)[0] == Pushed(1)
    assert time.monotonic() - begun >= 10 * REDIAL_S and len(primary.lines) == 11


def test_what_was_done_to_a_copy_that_was_dropped_meanwhile_is_not_answered(primary: Primary) -> None:
    """It is the primary again by then, of what it was filled with; a worker that was answered would not say it again."""
    answer, (_, told) = primary.push(1, 0)
    primary.shelf.rearrange(placed(2, [1]))
    primary.shelf.rearrange(placed(3, [1, 0], since=3))
    primary.shelf.rearrange(placed(4, [0, 1], since=3))
    told.set_result(reply(Done()))
    assert answer.result(PATIENCE_S)[0] == Moved()


# a push of which some copies know


class Three:
    """Servers that all hold one fragment. Lines between them are never cut."""

    def __init__(self) -> None:
        self.shelves = [KeyShelf(number, lambda address: DirectLine(self.shelves[int(address)])) for number in range(3)]
        self._layout = 0
        self.lead(0, 1, 2)

    def lead(self, *holders: int) -> None:
        """By the next layout the first of these does."""
        self._layout, count = self._layout + 1, len(holders)
        addresses = {server: str(server) for server in holders}
        layout = Placed(self._layout, [list(holders)], [[1] * count], [list(holders[1:])], addresses)
        for server in holders:
            self.shelves[server].rearrange(layout)

    def ask(self, server: int, call: Any, value: float = 0.0) -> Any:
        return self.shelves[server].handle(Asked(self._layout, call), body(value))[0]

    def keys(self, server: int) -> dict[str, tuple[int, float]]:
        drawer = self.shelves[server]._held[0]
        return {push.key: (push.at_least, float(tensor)) for push, tensor in drawer._store.everything()}


def body(value: float) -> memoryview:
    return memoryview(bytearray(struct.pack("d", value)))


def pushed(worker: int, number: int, key: str, combine: str) -> Pushes:
    return Pushes([0], worker, number, Push(key, "float64", (1,), combine))


@pytest.mark.parametrize("key", ["old", "new"])
@pytest.mark.parametrize("leads", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_who_takes_over_says_whether_a_push_counts_that_one_backup_was_told_of(
    key: str, leads: int, again: bool
) -> None:
    """Its primary is lost, and its worker too, or not: that one says it again."""
    world = Three()
    doubtful = pushed(9, 1, key, "assign" if key == "new" else "sum")
    for number, each in enumerate(("old", "other"), 1):
        world.ask(0, pushed(0, number, each, "assign"), 1.0)
    world.shelves[1].handle(Copy(1, 0, [1], doubtful), body(5.0))
    world.lead(leads, 3 - leads)
    world.ask(leads, Pulls([0], Pull("other")))
    assert world.keys(1) == world.keys(2), "before anybody is answered"
    if again:
        world.ask(leads, doubtful, 5.0)
    else:
        assert (world.keys(1).get(key) in ((2, 6.0), (1, 5.0))) == (leads == 1)
    world.ask(leads, pushed(0, 3, "old", "sum"), 2.0)
    value, version = (3.0, 2) if key == "new" or not (again or leads == 1) else (8.0, 3)
    assert world.keys(1) == world.keys(2) and world.keys(1)["old"] == (version, value)
    world.lead(3 - leads)
    if again:
        world.ask(3 - leads, doubtful, 5.0)
    assert world.keys(3 - leads) == world.keys(leads), "also its marks are the same"


def test_what_comes_late_of_a_take_over_changes_nothing() -> None:
    """A line has broken, and what was said on it is heard behind what was said since."""
    world = Three()
    world.ask(0, pushed(0, 1, "old", "assign"), 1.0)
    world.lead(1, 2)
    drawer = world.shelves[1]._held[0]
    late = [(replace(said, by=2, fragments=[0]), [*map(bytes, bodies)]) for said, bodies in drawer.all_said()]
    world.ask(1, pushed(0, 2, "old", "sum"), 2.0)
    for said, bodies in late:
        world.shelves[2].handle(Copy(2, 1, [1], said), memoryview(bytearray().join(bodies)))
    assert world.keys(1) == world.keys(2) == {"old": (2, 3.0)}
