"""An admitted connection, seen from the side that serves many: it never waits, and it forgives nothing."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wires import wire
from paceline.wires.connection import Connection, Ended, Received
from paceline.wires.messages import ANY, Done, Failed, Granted, Hello, Put, Value

Pair = tuple[Connection, socket.socket]
GONE = Ended("the other side closed the connection", False)
MESSAGES = [Hello(3, 4321), Put("key", "größe"), Value(""), Failed("x" * 3000, "y", 1, False), Done()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    connection = Connection(ours, ANY, "somebody")
    yield connection, theirs
    connection.close()
    theirs.close()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("paceline-test")
    os.write(fd, content)
    return fd


def content_and_close(fd: int) -> bytes:
    content = os.pread(fd, 100, 0)
    os.close(fd)
    return content


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# in


@given(st.lists(st.integers(0, 3200), max_size=12))
def test_messages_come_whole_in_whatever_pieces(cuts: list[int]) -> None:
    data = b"".join(wire.encode(message) for message in MESSAGES)
    ours, theirs = socket.socketpair()
    connection, found = Connection(ours, ANY), []
    for start, end in pairwise(sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})):
        theirs.sendall(data[start:end])
        found += connection.receive()
    assert found == [Received(message, []) for message in MESSAGES] and connection.ended is None
    connection.close()
    theirs.close()


def test_half_a_message_stops_nobody(pair: Pair) -> None:
    pair[1].sendall(wire.encode(Done())[:-1])
    assert pair[0].receive() == [] and pair[0].receive() == []
    assert pair[0].ended is None and pair[0].events == selectors.EVENT_READ


def test_the_last_words_count(pair: Pair) -> None:
    """A worker tells why it fails, and is gone."""
    wire.send(pair[1], Failed("boom", "", 1, False))
    pair[1].close()
    assert pair[0].receive() == [Received(Failed("boom", "", 1, False), [])]
    assert pair[0].ended == GONE


def test_a_long_message_takes_several_turns(pair: Pair) -> None:
    message = Value("x" * 5_000_000)
    sender = threading.Thread(target=wire.send, args=(pair[1], message))
    sender.start()
    turns, found = 0, []
    with selectors.DefaultSelector() as selector:
        selector.register(pair[0], selectors.EVENT_READ)
        while not found:
            assert selector.select(10)
            found = pair[0].receive()
            turns += 1
    sender.join()
    assert found == [Received(message, [])] and turns > 10


@pytest.mark.parametrize("length", [wire.LARGEST + 1, 0xFFFFFFFF])
def test_a_length_over_the_limit_is_foul(pair: Pair, length: int) -> None:
    pair[1].sendall(struct.pack("<I", length) + b"abc")
    assert pair[0].receive() == []
    assert pair[0].ended == Ended(f"a message of {length} bytes is over the limit", True)


def test_the_limit_can_be_lower() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, ANY, largest=100)
    theirs.sendall(wire.encode(Value("x" * 50)) + wire.encode(Value("x" * 100)))
    assert [received.message for received in connection.receive()] == [Value("x" * 50)]
    assert connection.ended is not None and connection.ended.foul
    connection.close()
    theirs.close()


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x81\xa4type\xa5Stuff", b"\x82\xa4type\xa4Done\xa1x" + b"\x91" * 100_000]
)
def test_nonsense_ends_it_and_what_came_before_counts(pair: Pair, payload: bytes) -> None:
    sender = threading.Thread(
        target=pair[1].sendall,
        args=(wire.encode(Done()) + struct.pack("<I", len(payload)) + payload + wire.encode(Done()),),
    )
    sender.start()
    found = []
    with selectors.DefaultSelector() as selector:
        selector.register(pair[0], selectors.EVENT_READ)
        while pair[0].ended is None:
            assert selector.select(10)
            found += pair[0].receive()
    sender.join()
    assert found == [Received(Done(), [])]
    assert pair[0].ended.foul and pair[0].ended.why.startswith("not a message: ")
    assert pair[0].receive() == [], "nothing is heard any more"


# descriptors


def test_descriptors_stay_with_their_messages(pair: Pair) -> None:
    for message, contents in ((Done(), []), (Hello(1, 2), [b"one"]), (Done(), []), (Granted(3), [b"two", b"three"])):
        fds = [memfd(content) for content in contents]
        wire.send(pair[1], message, tuple(fds))
        for fd in fds:
            os.close(fd)
    found = pair[0].receive()
    assert [received.message for received in found] == [Done(), Hello(1, 2), Done(), Granted(3)]
    assert not any(os.get_inheritable(fd) for received in found for fd in received.fds)
    contents_found = [[content_and_close(fd) for fd in received.fds] for received in found]
    assert contents_found == [[], [b"one"], [], [b"two", b"three"]]


def test_descriptors_wait_for_the_rest_of_their_message(pair: Pair) -> None:
    fd, data = memfd(b"mine"), wire.encode(Granted(1))
    wire.send(pair[1], Done())
    socket.send_fds(pair[1], [data[:2]], [fd])
    os.close(fd)
    assert pair[0].receive() == [Received(Done(), [])]
    pair[1].sendall(data[2:] + wire.encode(Done()))
    first, second = pair[0].receive()
    assert [content_and_close(fd) for fd in first.fds] == [b"mine"] and second.fds == []


@pytest.mark.parametrize("ending", ["garbage", "closed", "too many at once", "too many in pieces"])
def test_descriptors_of_no_message_are_closed(pair: Pair, ending: str) -> None:
    before, fd = open_descriptors(), memfd(b"unwanted")
    half = wire.encode(Value("x" * 100))[:50]
    if ending == "garbage":
        socket.send_fds(pair[1], [struct.pack("<I", 1) + b"\xc1"], [fd])
    elif ending == "closed":
        socket.send_fds(pair[1], [half], [fd])
        pair[1].close()
    elif ending == "too many at once":
        socket.send_fds(pair[1], [half], [fd] * 5)
    else:
        for byte in half[:5]:
            socket.send_fds(pair[1], [bytes([byte])], [fd])
    os.close(fd)
    while pair[0].ended is None:
        assert pair[0].receive() == []
    assert pair[0].ended.foul == (ending != "closed")
    pair[0].close()
    assert open_descriptors() <= before - 1, "the connection's own is closed too"


# out


def test_what_is_not_taken_at_once_waits(pair: Pair) -> None:
    fd = memfd(b"board")
    long = Value("x" * 900_000)
    for message, fds in ((long, ()), (Granted(1), (fd,)), (Done(), ())):
        pair[0].send(message, fds)
    os.close(fd)
    assert pair[0].events & selectors.EVENT_WRITE
    got: list[tuple[object, list[int]]] = []

    def read() -> None:
        got.extend(wire.receive(pair[1], ANY) for _ in range(3))

    reader = threading.Thread(target=read)
    reader.start()
    with selectors.DefaultSelector() as selector:
        selector.register(pair[0], selectors.EVENT_WRITE)
        while pair[0].events & selectors.EVENT_WRITE:
            assert selector.select(10)
            pair[0].flush()
    reader.join()
    assert [message for message, _ in got] == [long, Granted(1), Done()]
    assert [[content_and_close(fd) for fd in fds] for _, fds in got] == [[], [b"board"], []]


def test_one_who_never_reads_is_given_up(pair: Pair) -> None:
    fd, before = memfd(b"board"), open_descriptors()
    sent = 0
    while pair[0].ended is None and sent < 100:
        pair[0].send(Value("x" * 100_000), (fd,))
        sent += 1
    assert 10 < sent < 20
    assert pair[0].ended is not None and pair[0].ended.foul and "does not read" in pair[0].ended.why
    pair[0].send(Done())
    pair[0].close()
    assert open_descriptors() == before - 1, "the copies that waited are closed"
    os.close(fd)


def test_one_who_is_gone_is_no_error(pair: Pair) -> None:
    pair[1].close()
    pair[0].send(Done())
    assert pair[0].ended == Ended("the connection broke: Broken pipe", False)


def test_a_message_over_the_limit_is_our_own_mistake(pair: Pair) -> None:
    with pytest.raises(ValueError, match="over the limit"):
        pair[0].send(Value("x" * (wire.LARGEST + 1)))
    assert pair[0].ended is None
