"""From a donor to a newcomer, over real connections: everything comes, in order, or the end is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import OvertakenError
from paceline.wires import stream
from paceline.wires.listener import Listener
from paceline.wires.stream import Giving, Heal, Taking, reach
from paceline.wires.tls import Identity
from tests.cluster.visitors import PATIENCE_S, SECRET


def patiently() -> None:
    """Nothing ends the wait: a test that hangs is ended from outside."""


class Called:
    """A worker's listener, and who has called it."""

    def __init__(self, identity: Identity | None) -> None:
        self.listener = Listener("127.0.0.1", SECRET, identity)
        self.givings: list[Giving] = []
        self._came = threading.Semaphore(0)
        self.listener.serve(Heal, self._take)

    def _take(self, label: Heal, sock: socket.socket) -> None:
        self.givings.append(Giving(label.worker, sock, patiently))
        self._came.release()

    def call(self) -> tuple[Giving, Taking]:
        taking = reach(self.listener.address, SECRET, 7, patiently)
        assert self._came.acquire(timeout=PATIENCE_S)
        return self.givings[-1], taking

    def close(self) -> None:
        for giving in self.givings:
            giving.close()
            if giving._thread.is_alive():
                giving._thread.join(PATIENCE_S)
        self.listener.close()


@pytest.fixture(params=["tcp", "tls"])
def called(request: pytest.FixtureRequest) -> Iterator[Called]:
    found = Called(Identity.make() if request.param == "tls" else None)
    yield found
    found.close()


def test_messages_come_in_order_and_whole(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_CHUNK", 1000)
    giving, taking = called.call()
    assert giving.worker == 7
    messages = [bytearray(bytes([n % 251]) * size) for n, size in enumerate([5000, 1, 999, 1000, 1001, 300_000, 2])]
    for message in messages:
        giving.put(message)
    assert taking.take() == messages[0] and not taking.near, "nothing is near before the state is there"
    for message in messages[1:]:
        assert taking.take() == message
    while not taking.near:
        giving.put(bytearray(b"one more"))
        assert taking.take() == b"one more"
    taking.close()


def test_a_donor_waits_until_there_is_room(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wires.pace._ROOM", 1000)
    giving, taking = called.call()
    giving.put(bytearray(8))
    giving.keep_pace()
    for _ in range(3):
        giving.put(bytearray(400))
    waits = threading.Thread(target=giving.keep_pace)
    waits.start()
    assert waits.is_alive()
    taking.take()
    taking.take()
    waits.join(PATIENCE_S)
    assert not waits.is_alive()
    taking.close()


def test_a_newcomer_that_goes_holds_nobody(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wires.pace._ROOM", 0)
    giving, taking = called.call()
    giving.put(bytearray(8))
    giving.put(bytearray(100))
    taking.close()
    giving.keep_pace()  # until its going is seen
    assert giving.ended
    giving.put(bytearray(8))
    giving._thread.join(PATIENCE_S)


@pytest.mark.parametrize("begun", [False, True])
def test_the_donor_goes(called: Called, begun: bool) -> None:
    giving, taking = called.call()
    if begun:
        giving.put(bytearray(8))
        assert len(taking.take()) == 8
    giving.close()
    with pytest.raises(OvertakenError, match="hung up"):
        taking.take()
    taking.close()


def test_whoever_waits_can_be_told_to_stop(called: Called) -> None:
    _, taking = called.call()

    def stop() -> None:
        raise OvertakenError("worker 3 is gone")

    taking._check = stop
    with pytest.raises(OvertakenError, match="worker 3 is gone"):
        taking.take()
    taking.close()


def test_a_changed_byte_is_seen() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    message = bytearray(b"state")
    (head, chunk) = stream._Chunks().next(stream.deque([memoryview(message)]), False)
    theirs.sendall(bytes(head) + b"stale")
    with pytest.raises(OvertakenError, match="not what was sent"):
        Taking(ours, patiently).take()
    theirs.sendall(bytes(head) + bytes(chunk))
    assert Taking(ours, patiently).take() == b"state"
    ours.close()
    theirs.close()


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError):
        reach(f"tcp://127.0.0.1:{port}", SECRET, 7, patiently)
