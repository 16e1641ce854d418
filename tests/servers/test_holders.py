"""A worker's view of the servers when lines break: what was said is said again, and nothing is waited for that cannot come."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from paceline.errors import PeerLostError
from paceline.servers.calling import Reply
from paceline.servers.finding import FarFleet
from paceline.servers.holders import Holders
from paceline.servers.lines import Server
from paceline.servers.messages import Done, Drawing, Outline
from paceline.wires.messages import Layout, Placed

LAYOUT = Placed(1, [[0]], [[1]], [[]], {0: "there"})


class FakeLine:
    """Answers at once, or never."""

    def __init__(self, answers: bool) -> None:
        self._answers, self.over = answers, False

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        if self._answers or isinstance(message, Outline):
            future.set_result(Reply(Done(), memoryview(b"")))
        return future

    def close(self) -> None:
        self.over = True


class OneServer:
    """The first connection's calls are never answered, those of the next ones are. There is one layout, for ever."""

    def __init__(self) -> None:
        self.dialled: list[Server] = []

    def size(self, nbytes: list[int]) -> None:
        pass

    def layout(self, after: int) -> Placed:
        assert after < LAYOUT.number, "no other layout will come"
        return LAYOUT

    def dial(self, address: str) -> Server:
        self.dialled.append(Server(*(FakeLine(bool(self.dialled)) for _ in range(2))))
        return self.dialled[-1]


def placed(directory: OneServer) -> Holders:
    holders = Holders(directory)
    holders.place(Drawing([], [], []), [8])
    return holders


@pytest.mark.parametrize("broken", ["out", "back"])
def test_a_line_that_breaks_is_seen_by_who_waits_on_the_other_one(broken: str) -> None:
    """What was said on it, and nobody waits for, may be just what the other one's answer depends on."""
    directory = OneServer()
    holders = placed(directory)
    told: list[int] = []

    def attempt() -> list[Reply]:
        told.append(holders.moves)
        holders.out([0], Outline())
        waited = holders.back([0], Layout(0))
        if len(told) == 1:
            getattr(directory.dialled[0], broken).over = True
        return holders.wait([waited])

    assert len(holders.through(attempt)) == 1
    assert len(directory.dialled) == 2 and directory.dialled[0].out.over and directory.dialled[0].back.over
    assert told[1] > told[0], "who counts by that says all of it again"


def test_nobody_is_dialled_once_layouts_cannot_be_followed_any_more() -> None:
    """As long as it was in the last one that came, a server would be dialled for ever."""
    asked = threading.Event()

    def follow(question: Layout) -> tuple[Placed, list[int]]:
        if question.after == 0:
            return Placed(1, [[0]], [[1]], [[]], {0: "tcp://127.0.0.1:1"}, rooms={"parameters": (0, 1)}), []
        asked.set()
        raise PeerLostError("no agent has led the run for 60 s")

    fleet = FarFleet(lambda question: (None, []), b"secret", "worker 0", "parameters", follow, lambda: None)
    assert asked.wait(20)
    with pytest.raises(PeerLostError, match="no agent has led"):
        fleet.dial("tcp://127.0.0.1:1")
