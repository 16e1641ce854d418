"""The shell of a server: who may call, one thread a caller, refusals, and a clean end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from paceline.servers.calling import Line, RefusedError, dial
from paceline.servers.serving import Answer, Caller, Opening, Serving
from paceline.tensors.channel import PREFIX, ChannelError
from paceline.wires import wire
from paceline.wires.tls import Identity
from tests.cluster.visitors import PATIENCE_S, SECRET, hung_up


class Say(msgspec.Struct, tag=True, frozen=True):
    words: str


class Wait(msgspec.Struct, tag=True, frozen=True):
    """Answered once the test says so."""


class Heard(msgspec.Struct, tag=True, frozen=True):
    words: str
    name: str


class Counts:
    """What a server moves, by call."""

    def __init__(self) -> None:
        self.of: list[tuple[int, int]] = []

    def __call__(self, received: int, sent: int) -> None:
        self.of.append((received, sent))


class House:
    """A server under every kind of address, and what its handler does."""

    def __init__(self, identity: Identity) -> None:
        self.go_on = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.callers: list[Caller] = []
        self.counts = Counts()
        self.sent: list[str] = []
        unix, tcp = f"paceline-test-{secrets.token_hex(8)}", wire.listen_tcp()
        secured = wire.listen_tcp()
        self.addresses = {
            "shared": unix,
            "unix": unix,
            "tcp": f"tcp://127.0.0.1:{tcp.getsockname()[1]}",
            "tls": f"tls://127.0.0.1:{secured.getsockname()[1]}",
        }
        self._servers = [
            Serving([wire.listen(unix), tcp], SECRET, Say | Wait, self.handle, meter=self.counts),
            Serving([secured], SECRET, Say | Wait, self.handle, identity, self.counts),
        ]

    def handle(self, caller: Caller, message: Any, body: memoryview) -> Answer | tuple[msgspec.Struct, list[bytes]]:
        self.callers.append(caller)
        if isinstance(message, Wait):
            self.waiting.release()
            assert self.go_on.wait(PATIENCE_S)
            return Heard("waited", caller.name), [b"at last"]
        if message.words == "mistake":
            raise RuntimeError("a mistake of the server's")
        if message.words == "nonsense":
            raise ValueError("that makes no sense")
        return Answer(Heard(message.words, caller.name), [bytes(body)], lambda: self.sent.append(message.words))

    def dial(self, carrier: str, name: str = "somebody") -> Line:
        shared = None if carrier in ("shared", "tcp") else False
        return Line(dial(self.addresses[carrier], SECRET, name, shared), Heard)

    def close(self) -> None:
        self.go_on.set()
        for server in self._servers:
            server.close()


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture
def house(identity: Identity) -> Iterator[House]:
    found = House(identity)
    yield found
    found.close()


@pytest.fixture(params=["shared", "unix", "tcp", "tls"])
def line(request: pytest.FixtureRequest, house: House) -> Iterator[Line]:
    found = house.dial(request.param, "worker 3")
    yield found
    found.close()


def test_a_call_is_answered(line: Line, house: House) -> None:
    reply = line.call(Say("hello"), b"some ", b"bytes").result(PATIENCE_S)
    assert reply.message == Heard("hello", "worker 3") and bytes(reply.body) == b"some bytes"
    assert [caller.name for caller in house.callers] == ["worker 3"]
    heads = (len(msgspec.msgpack.encode(said)) for said in (Say("hello"), reply.message))
    assert house.counts.of == [tuple(head + len(b"some bytes") for head in heads)]


def test_a_large_body_comes_back(line: Line) -> None:
    body, into = os.urandom(20 << 20), memoryview(bytearray(20 << 20))
    assert line.call(Say("large"), body, into=into).result(PATIENCE_S).body.nbytes == len(body)
    assert into == body


def test_a_refusal_is_a_sentence_and_the_connection_goes_on(line: Line) -> None:
    with pytest.raises(RefusedError, match="that makes no sense"):
        line.call(Say("nonsense"), b"body").result(PATIENCE_S)
    with pytest.raises(RefusedError, match=r"unknown|Invalid"):
        line.call(Heard("not", "a call")).result(PATIENCE_S)
    assert line.call(Say("again")).result(PATIENCE_S).message.words == "again"


def test_a_mistake_of_the_servers_costs_that_connection(
    line: Line, house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConnectionError, match="the connection to the server has ended"):
        line.call(Say("mistake")).result(PATIENCE_S)
    assert "a mistake of the server's" in capfd.readouterr().err
    assert_serves(house)


def assert_serves(house: House) -> None:
    for carrier in ("shared", "tcp"):
        other = house.dial(carrier)
        assert other.call(Say("hello")).result(PATIENCE_S).message.words == "hello"
        other.close()


def test_it_is_said_when_an_answer_is_no_longer_needed(house: House) -> None:
    line = house.dial("shared")
    for words in ("one", "two"):
        line.call(Say(words)).result(PATIENCE_S)
    line.call(Say("nonsense")).exception(PATIENCE_S)
    assert house.sent == ["one", "two"]
    line.close()


def test_who_waits_holds_up_nobody_else(line: Line, house: House) -> None:
    waiting = line.call(Wait())
    assert house.waiting.acquire(timeout=PATIENCE_S)
    assert_serves(house)
    assert not waiting.done()
    house.go_on.set()
    assert bytes(waiting.result(PATIENCE_S).body) == b"at last"


@pytest.mark.parametrize("carrier", ["shared", "tcp"])
def test_a_frozen_caller_holds_up_nobody_else(house: House, carrier: str) -> None:
    """A process that was stopped while the server sends it more than any buffer takes."""

    def call(say: Callable[[bytes], object]) -> None:
        channel = dial(house.addresses[carrier], SECRET, "frozen")
        say(b"here")
        for _ in range(8):
            channel.send(msgspec.msgpack.encode(Say("large")), bytes(4 << 20))  # and never reads

    with forked(call) as pid:
        house.callers.clear()
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(3):
            assert_serves(house)


@pytest.mark.parametrize("carrier", ["shared", "tcp"])
def test_a_killed_caller_costs_its_own_connection(house: House, carrier: str) -> None:
    def call(say: Callable[[bytes], object]) -> None:
        channel = dial(house.addresses[carrier], SECRET, "killed")
        say(b"here")
        while True:
            channel.send(msgspec.msgpack.encode(Say("large")), bytes(64 << 20))

    with forked(call):
        pass
    assert_serves(house)


class forked:
    """A process that does this; it has said something by the time the block begins, and is killed behind it."""

    def __init__(self, work: Callable[[Callable[[bytes], object]], None]) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                work(theirs.send)
                signal.pause()
            finally:
                os._exit(1)
        theirs.close()
        with ours:
            assert ours.recv(10)

    def __enter__(self) -> int:
        return self._pid

    def __exit__(self, *error: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


# strangers and nonsense


def test_a_wrong_secret_is_not_served(house: House) -> None:
    with pytest.raises(OSError, match=r"handshake|reset"):
        dial(house.addresses["shared"], bytes(32), "stranger")
    assert_serves(house)


@pytest.mark.parametrize(
    "words",
    [
        wire.LENGTH.pack(3) + b"\xc1\xc1\xc1",
        b"\xff\xff\xff\x7f",
        wire.encode(Heard("no", "opening")),
        wire.encode(Opening("x", False)) + PREFIX.pack(0, 0),
        wire.encode(Opening("x", False)) + PREFIX.pack(10, 1 << 60),
        wire.encode(Opening("x", True)) + b"noise" * 100,
    ],
)
@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_nonsense_ends_its_own_connection(house: House, carrier: str, words: bytes) -> None:
    with wire.connect(house.addresses[carrier], SECRET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(words)
        _until_hung_up(sock)
    assert_serves(house)


def _until_hung_up(sock: socket.socket) -> None:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


def test_who_says_nothing_is_sent_away(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)
    with wire.connect(house.addresses["tcp"], SECRET) as sock:
        sock.settimeout(PATIENCE_S)
        assert hung_up(sock)


def test_shared_memory_is_for_callers_of_this_machine(house: House) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        dial(house.addresses["tcp"], SECRET, "far", shared=True)


# the end


def test_closing_ends_every_connection(line: Line, house: House) -> None:
    line.call(Say("hello")).result(PATIENCE_S)
    house.close()
    with pytest.raises(ConnectionError, match="has ended"):
        line.call(Say("more")).result(PATIENCE_S)


def test_closing_ends_an_answer_that_nobody_takes(house: House) -> None:
    channel = dial(house.addresses["shared"], SECRET, "deaf")
    senders = threading.Thread(target=_send_until_it_ends, args=(channel,))
    senders.start()
    house.close()
    senders.join(PATIENCE_S)
    assert not senders.is_alive()
    channel.close()


def _send_until_it_ends(channel: Any) -> None:
    with pytest.raises(ChannelError):
        while True:
            channel.send(msgspec.msgpack.encode(Say("large")), bytes(4 << 20))
