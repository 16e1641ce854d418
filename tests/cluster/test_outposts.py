"""What the agent that leads says to other machines, over real connections."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import between
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal, Machine
from paceline.cluster.outposts import Outposts
from paceline.wires import wire
from paceline.wires.board import Board
from paceline.wires.door import Door

SECRET = bytes(32)
REPORT = between.Report({}, {}, [], False, False, {})


@pytest.fixture
def outposts() -> Iterator[Outposts]:
    journal = Journal.begin(2, 0, 5, 0.0, Machine("here", "a"), machines=2)
    journal.machines[1] = Machine("there", "b", here=False)
    coordinator = SimpleNamespace(journal=journal, machine_came=lambda number: None)
    board = Board.create(4)
    node: Any = SimpleNamespace(
        selector=selectors.DefaultSelector(),
        board=board,
        job=Job("train.py", [], False, {}, "/", []),
        folder=SimpleNamespace(id="it"),
        place=SimpleNamespace(reach=SimpleNamespace(run="")),
        number=0,
    )
    made = Outposts(Door(wire.listen_tcp(), SECRET, 0.0), node, coordinator, fence=3)  # type: ignore[arg-type]
    yield made
    made.close()
    node.selector.close()
    board.close()


def served(outposts: Outposts, until: threading.Event) -> None:
    """As the leader's loop does."""
    while not until.is_set():
        for key, _ in outposts._selector.select(0.01):
            key.data(key.fileobj)


def joined(outposts: Outposts) -> socket.socket:
    """A machine that has joined, and was told the journal."""
    done = threading.Event()
    serving = threading.Thread(target=served, args=(outposts, done))
    serving.start()
    try:
        sock = wire.connect(f"tcp://{outposts.address}", SECRET)
        wire.send(sock, between.Join("b"))
        told, _ = wire.receive(sock, between.FROM_LEADER)
        assert isinstance(told, between.Told) and told.fence == 3
    finally:
        done.set()
        serving.join()
    return sock


def hang_up(outposts: Outposts) -> None:
    outposts.end()
    for peer in list(outposts.peers):
        outposts.drop(peer)


def test_the_end_is_heard_although_reports_are_on_their_way(outposts: Outposts) -> None:
    """A connection that is closed with something unread is reset, and takes with it what the other side has not read."""
    with closing(joined(outposts)) as sock:
        for _ in range(200):
            wire.send(sock, REPORT)
        outposts._coordinator.journal.exit_code = 7
        ended = threading.Thread(target=hang_up, args=(outposts,))
        ended.start()
        told, _ = wire.receive(sock, between.FROM_LEADER)
        wire.send(sock, REPORT)  # said before it had read that
        assert Journal.decode(told.journal).exit_code == 7
        sock.close()
        ended.join()
