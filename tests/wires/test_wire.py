"""What workers and agent say: whole messages, descriptors beside them, and nothing from strangers."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wires import wire
from paceline.wires.handshake import GREETING_BYTES, NONCE_BYTES, Gate, Knock
from paceline.wires.messages import (
    ANY,
    After,
    Claim,
    Done,
    Entering,
    Failed,
    Get,
    Granted,
    Healed,
    Hello,
    Next,
    Put,
    Ready,
    Refused,
    Segment,
    Value,
    Welcome,
)
from paceline.wires.wire import SECRET_BYTES, ConnectionClosed
from tests.cluster.asking import Link

SECRET = bytes(range(SECRET_BYTES))
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    one.settimeout(10)
    two.settimeout(10)
    with one, two:
        yield one, two


def memfd(content: bytes) -> int:
    fd = os.memfd_create("paceline-test")
    os.write(fd, content)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


WELCOME = Welcome(rows=108, term=3, members=[0, 2, 5], homes=[0, 1, 0], deaths=2)

MESSAGES = [
    Hello(3, 4321),
    WELCOME,
    Ready(),
    Claim([2, 0, 1]),
    Healed(),
    After(3),
    Entering(4),
    Next(5, [2, 0, 7], [1, 0, 0], 3),
    Segment("term-1/meet", 1 << 40),
    Granted(5),
    Put("store", "29500"),
    Get("store"),
    Value("größe\n"),
    Failed("boom", "Traceback…", 2, True),
    Value(""),
    Done(),
    Refused("no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(pair: Pair, message: Any) -> None:
    wire.send(pair[0], message)
    back, fds = wire.receive(pair[1], ANY)
    assert back == message and type(back) is type(message) and fds == []


def test_messages_in_a_row_stay_apart(pair: Pair) -> None:
    for message in MESSAGES:
        wire.send(pair[0], message)
    assert [wire.receive(pair[1], ANY)[0] for _ in MESSAGES] == MESSAGES


def test_a_long_message_arrives_whole(pair: Pair) -> None:
    message = Failed("x" * 2_000_000, "y", 1, False)
    sender = threading.Thread(target=wire.send, args=(pair[0], message))
    sender.start()
    assert wire.receive(pair[1], ANY)[0] == message
    sender.join()


def test_a_message_that_comes_byte_by_byte_is_put_together(pair: Pair) -> None:
    wire.send(pair[0], Put("key", "value"))
    raw = pair[1].recv(1000)

    def trickle() -> None:
        for byte in raw:
            pair[0].sendall(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()
    assert wire.receive(pair[1], ANY)[0] == Put("key", "value")
    sender.join()


def test_descriptors_travel_with_their_message(pair: Pair) -> None:
    fds = [memfd(content) for content in (b"board", b"one", b"two")]
    wire.send(pair[0], WELCOME, (fds[0],))
    wire.send(pair[0], Done())
    wire.send(pair[0], Granted(9), (fds[1], fds[2]))
    inodes = [os.fstat(fd).st_ino for fd in fds]
    for fd in fds:
        os.close(fd)
    got = [wire.receive(pair[1], ANY) for _ in range(3)]
    assert [message for message, _ in got] == [WELCOME, Done(), Granted(9)]
    arrived = [received for _, received in got]
    assert [len(received) for received in arrived] == [1, 0, 2]
    flat = [fd for received in arrived for fd in received]
    assert [content_of(fd) for fd in flat] == [b"board", b"one", b"two"]
    assert [os.fstat(fd).st_ino for fd in flat] == inodes
    assert not any(os.get_inheritable(fd) for fd in flat)
    for fd in flat:
        os.close(fd)


# nonsense


def test_the_other_sides_end_is_an_error_that_says_so(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(ConnectionClosed, match="closed the connection"):
        wire.receive(pair[1], ANY)


def test_an_end_in_the_middle_of_a_message_too(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 100) + b"half")
    pair[0].close()
    with pytest.raises(ConnectionClosed):
        wire.receive(pair[1], ANY)


@pytest.mark.parametrize("length", [(16 << 20) + 1, 0xFFFFFFFF])
def test_an_oversized_length_is_refused_before_anything_is_read(pair: Pair, length: int) -> None:
    pair[0].sendall(struct.pack("<I", length))
    with pytest.raises(ConnectionClosed, match=f"a message of {length} bytes is over the limit"):
        wire.receive(pair[1], ANY)


@given(st.binary(max_size=60))
def test_garbage_is_a_value_error_never_something_else(raw: bytes) -> None:
    """The agent drops a connection on OSError and ValueError; anything else would end the agent."""
    one, two = socket.socketpair()
    with one, two:
        one.sendall(struct.pack("<I", len(raw)) + raw)
        with pytest.raises(ValueError):
            wire.receive(two, ANY)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x81\xa4type\xa5Stuff",  # an unknown kind
        b"\x81\xa4type\xa5Hello",  # fields are missing
        b"\x83\xa4type\xa5Hello\xa6worker\xa1x\xa3pid\x01",  # a worker that is no number
        b"\xc1",
        b"",
        b"\x82\xa4type\xa4Done\xa1x" + b"\x91" * 100_000,  # a nest that would be the agent's RecursionError
    ],
)
def test_messages_of_another_form_are_refused(pair: Pair, raw: bytes) -> None:
    pair[0].sendall(struct.pack("<I", len(raw)) + raw)
    with pytest.raises(ValueError):
        wire.receive(pair[1], ANY)


@pytest.mark.parametrize(
    "raw", [struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 0xFFFFFFFF)], ids=["garbage", "oversized"]
)
def test_descriptors_beside_nonsense_are_closed(pair: Pair, raw: bytes) -> None:
    """Else whoever sends it fills the agent's table of descriptors. The leak fixture counts them."""
    fd = memfd(b"unwanted")
    try:
        socket.send_fds(pair[0], [raw], [fd])
    finally:
        os.close(fd)
    with pytest.raises((ValueError, OSError)):
        wire.receive(pair[1], ANY)


# who may speak


@pytest.fixture
def server() -> Iterator[tuple[str, socket.socket]]:
    address = f"paceline-test-{secrets.token_hex(8)}"
    listening = wire.listen(address)
    listening.settimeout(10)
    with listening:
        yield address, listening


def admitted(listening: socket.socket, wait_s: float = 10) -> bool:
    sock, _ = listening.accept()
    with sock:
        sock.settimeout(wait_s)
        return wire.admit(sock, SECRET)


def knocked(address: str, secret: bytes) -> threading.Thread:
    """Somebody who comes with this secret, and leaves as soon as he is in or sent away."""

    def come() -> None:
        with contextlib.suppress(OSError):
            Link(address, secret, ANY).close()

    thread = threading.Thread(target=come)
    thread.start()
    return thread


def test_the_secret_opens_the_door(server: tuple[str, socket.socket]) -> None:
    visitor = knocked(server[0], SECRET)
    assert admitted(server[1])
    visitor.join()


@pytest.mark.parametrize(
    "given_secret",
    [bytes(SECRET_BYTES), SECRET[:-1] + b"\x00", SECRET[::-1]],
    ids=["zeros", "one byte off", "reversed"],
)
def test_a_wrong_secret_does_not(server: tuple[str, socket.socket], given_secret: bytes) -> None:
    visitor = knocked(server[0], given_secret)
    assert not admitted(server[1])
    visitor.join()


def test_a_visitor_is_not_deceived_by_one_who_took_the_agents_place(server: tuple[str, socket.socket]) -> None:
    """He answers with a nonce of his own, but has no proof."""

    def impostor() -> None:
        sock, _ = server[1].accept()
        with sock:
            sock.recv(GREETING_BYTES)
            sock.sendall(Gate(bytes(SECRET_BYTES), bytes(NONCE_BYTES)).greeting)
            sock.recv(100)
            sock.sendall(bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ConnectionClosed, match="does not know the run's secret"):
        Link(server[0], SECRET, ANY)
    thread.join()


def test_a_recorded_handshake_opens_nothing(server: tuple[str, socket.socket]) -> None:
    said: list[bytes] = []

    def eavesdrop() -> None:
        """Between the two, passing on what it hears."""
        visitor, _ = tap.accept()
        with visitor, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.connect("\0" + server[0])
            for size in (GREETING_BYTES, 32):
                said.append(visitor.recv(size))
                agent.sendall(said[-1])
                visitor.sendall(agent.recv(size))

    with wire.listen(server[0] + "-tap") as tap:
        listening = threading.Thread(target=eavesdrop)
        listening.start()
        honest = knocked(server[0] + "-tap", SECRET)
        assert admitted(server[1])
        honest.join()
        listening.join()
    assert [len(piece) for piece in said] == [GREETING_BYTES, 32]
    assert not any(SECRET[at : at + 8] in b"".join(said) for at in range(SECRET_BYTES - 8)), "the secret travelled"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as replay:
        replay.connect("\0" + server[0])
        replay.sendall(b"".join(said))
        assert not admitted(server[1])


@pytest.mark.parametrize("start", [0, 1, GREETING_BYTES - 1, GREETING_BYTES])
def test_one_who_falls_silent_is_given_up(server: tuple[str, socket.socket], start: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect("\0" + server[0])
        visitor.sendall(Knock(SECRET, bytes(NONCE_BYTES)).greeting[:start])
        assert not admitted(server[1], wait_s=0.05)


def test_one_who_leaves_too(server: tuple[str, socket.socket]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect("\0" + server[0])
        visitor.sendall(b"PACE")
    assert not admitted(server[1])


def test_a_web_browser_hears_nothing(server: tuple[str, socket.socket]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect("\0" + server[0])
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not admitted(server[1])
        with contextlib.suppress(ConnectionResetError):
            assert visitor.recv(100) == b""


def test_descriptors_beside_the_handshake_are_closed(server: tuple[str, socket.socket]) -> None:
    fd = memfd(b"unwanted")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect("\0" + server[0])
        socket.send_fds(visitor, [Knock(SECRET, bytes(NONCE_BYTES)).greeting + bytes(32)], [fd])
        os.close(fd)
        assert not admitted(server[1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused_even_with_the_secret(server: tuple[str, socket.socket]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            Link(server[0], SECRET, ANY)
        finally:
            os._exit(0)
    assert not admitted(server[1])
    os.waitpid(pid, 0)


def test_two_runs_never_collide_and_leave_no_file(server: tuple[str, socket.socket]) -> None:
    with pytest.raises(OSError, match="in use"):
        wire.listen(server[0])
    assert not os.path.exists(server[0])


# the worker's side


def test_a_link_asks_and_is_answered(server: tuple[str, socket.socket]) -> None:
    def agent() -> None:
        sock, _ = server[1].accept()
        with sock:
            assert wire.admit(sock, SECRET)
            message, _ = wire.receive(sock, ANY)
            fd = memfd(b"board")
            wire.send(sock, Welcome(9, 1, [message.worker], [0], 0), (fd,))
            os.close(fd)

    thread = threading.Thread(target=agent)
    thread.start()
    link = Link(server[0], SECRET, ANY)
    answer, fds = link.ask(Hello(6, os.getpid()))
    thread.join()
    assert answer == Welcome(9, 1, [6], [0], 0)
    assert [content_of(fd) for fd in fds] == [b"board"]
    os.close(fds[0])
    with pytest.raises(OSError):
        link.ask(Done())
    link.tell(Value("to nobody"))  # an agent that died must not end the training
    link.close()


def test_there_is_no_link_without_an_agent() -> None:
    with pytest.raises(OSError):
        Link("paceline-test-nobody-listens", SECRET, ANY)
