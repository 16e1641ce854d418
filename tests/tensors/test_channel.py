"""Channels: every carrier does the same. What is sent arrives, whole and in order, wherever it was told to go."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import ResourceError
from paceline.tensors import ring, sharing
from paceline.tensors.channel import (
    LARGEST_BODY,
    LARGEST_HEAD,
    PREFIX,
    BadMessage,
    Channel,
    ChannelEnded,
    ChannelError,
    TornMessage,
    lend,
    memory_of,
)
from paceline.tensors.streamed import StreamChannel
from paceline.wires import wire
from tests.tensors.carriers import (
    BETWEEN_PROCESSES,
    CARRIERS,
    SMALL_CHUNK,
    SMALL_RING,
    Peer,
    shared,
    tcp_sockets,
    thread,
    unix_sockets,
)

Ends = tuple[Channel, Channel]
SIZES = [1, 63, 64, SMALL_CHUNK - 1, SMALL_CHUNK, SMALL_CHUNK + 1, SMALL_RING - 1, SMALL_RING, SMALL_RING + 1, 1 << 20]


@pytest.fixture(params=list(CARRIERS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    found = CARRIERS[request.param]()
    yield found
    for end in found:
        end.close()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def place_into(memory: bytearray, head: bytes, nbytes: int) -> memoryview:
    return memoryview(memory)


# what arrives


def test_head_and_body_arrive(ends: Ends) -> None:
    ends[0].send(b"head", b"bo", bytearray(b"d"), memoryview(b"y"))
    head, body = ends[1].receive()
    assert (head, bytes(body)) == (b"head", b"body")


def test_it_goes_both_ways(ends: Ends) -> None:
    ends[0].send(b"there", b"1")
    ends[1].send(b"back", b"22")
    assert [bytes(end.receive().body) for end in ends] == [b"22", b"1"]


def test_a_message_may_have_no_body(ends: Ends) -> None:
    ends[0].send(b"alone")
    ends[0].send(b"empty", b"", b"")
    assert [ends[1].receive() for _ in range(2)] == [(b"alone", b""), (b"empty", b"")]


@pytest.mark.parametrize("into", ["lent", "placed"])
def test_bodies_of_all_sizes_arrive_in_order(ends: Ends, into: str) -> None:
    def send() -> None:
        for number, size in enumerate(SIZES):
            ends[0].send(b"%d" % size, noise(size, number))

    with thread(send):
        for number, size in enumerate(SIZES):
            memory = bytearray(size)
            head, body = ends[1].receive(partial(place_into, memory) if into == "placed" else lend)
            assert head == b"%d" % size and bytes(body) == noise(size, number)
            assert into == "lent" or memory == body


def test_a_body_is_read_straight_into_a_tensor(ends: Ends) -> None:
    values = torch.arange(50_000, dtype=torch.float32)
    target = torch.zeros(50_000)
    with thread(ends[0].send, b"values", memory_of(values)):
        body = ends[1].receive(lambda head, nbytes: memory_of(target)).body
    assert torch.equal(target, values) and body.nbytes == target.nbytes


def test_many_buffers_are_gathered(ends: Ends) -> None:
    """More than the kernel takes in one call, and not one of them begins where a chunk does."""
    pieces = [noise(number % 700, number) for number in range(1500)]
    with thread(ends[0].send, b"pieces", *pieces):
        assert bytes(ends[1].receive().body) == b"".join(pieces)


def test_what_is_lent_stays_until_it_is_given_back(ends: Ends) -> None:
    """However much is sent meanwhile."""

    def send() -> None:
        for number in range(60):
            ends[0].send(b"x", noise(SMALL_CHUNK, number))

    with thread(send):
        for number in range(60):
            body = ends[1].receive().body
            assert bytes(body) == noise(SMALL_CHUNK, number)
            if number % 2:
                ends[1].release()


def test_a_body_that_was_lent_begins_on_a_boundary(ends: Ends) -> None:
    for _ in range(3):
        ends[0].send(b"head", noise(1001))
        body = ends[1].receive().body
        if not hasattr(ends[1], "_other"):
            assert np.frombuffer(body, dtype=np.uint8).ctypes.data % 64 == 0


def test_several_threads_send_at_once(ends: Ends) -> None:
    threads, each = 4, 40

    def send(who: int) -> None:
        for number in range(each):
            ends[0].send(b"%d %d" % (who, number), bytes([who]) * (37 * number), bytes([number]) * 5000)

    workers = [threading.Thread(target=send, args=(who,)) for who in range(threads)]
    for worker in workers:
        worker.start()
    seen: dict[int, int] = {}
    for _ in range(threads * each):
        head, body = ends[1].receive()
        who, number = map(int, head.split())
        assert bytes(body) == bytes([who]) * (37 * number) + bytes([number]) * 5000
        assert seen.get(who, -1) == number - 1
        seen[who] = number
    for worker in workers:
        worker.join()


def test_both_sides_send_large_bodies_at_once(ends: Ends) -> None:
    """Each with a thread that receives: then two full pipes hold nobody up."""
    body = noise(3 << 20)
    sending = thread(ends[0].send, b"one", body), thread(ends[1].send, b"other", body)
    with sending[0], sending[1], thread(lambda: bytes(ends[0].receive().body)) as first:
        assert bytes(ends[1].receive().body) == body
    assert first == [body]


# what is refused


def test_a_head_that_is_too_long_is_the_callers_mistake(ends: Ends) -> None:
    for head in (b"", bytes(LARGEST_HEAD + 1)):
        with pytest.raises(ValueError, match="a head has 1 to"):
            ends[0].send(head)
    ends[0].send(bytes(LARGEST_HEAD), b"body")
    assert len(ends[1].receive().head) == LARGEST_HEAD


def test_a_place_of_another_size_is_a_mistake(ends: Ends) -> None:
    ends[0].send(b"head", b"four")
    with pytest.raises(AssertionError):
        ends[1].receive(lambda head, nbytes: memoryview(bytearray(nbytes - 1)))


def raw_ends(carrier: str) -> tuple[socket.socket, Channel]:
    """One who can say anything, and a channel that hears it."""
    if carrier == "shared":
        one, other = shared(SMALL_RING, SMALL_CHUNK)
        one._returns.close()
        return one._socket, other
    one_socket, other_socket = tcp_sockets() if carrier == "tcp" else unix_sockets()
    return one_socket, StreamChannel(other_socket)


@pytest.fixture(params=["unix", "tcp", "shared"])
def raw(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Channel]]:
    sock, channel = raw_ends(request.param)
    yield sock, channel
    sock.close()
    channel.close()


@pytest.mark.parametrize("prefix", [(0, 0), (LARGEST_HEAD + 1, 0), (1, LARGEST_BODY + 1), (1 << 31, 1 << 63)])
def test_a_length_that_cannot_be_is_no_message(raw: tuple[socket.socket, Channel], prefix: tuple[int, int]) -> None:
    raw[0].sendall(PREFIX.pack(*prefix))
    with pytest.raises(BadMessage, match=rf"a head of {prefix[0]} bytes and a body of {prefix[1]}"):
        raw[1].receive()


@pytest.mark.parametrize(
    "words", [b"\1", PREFIX.pack(4, 0), PREFIX.pack(4, 0) + b"he", PREFIX.pack(4, 10000) + b"head"]
)
def test_an_end_in_the_middle_is_a_torn_message(raw: tuple[socket.socket, Channel], words: bytes) -> None:
    raw[0].sendall(words)
    raw[0].close()
    with pytest.raises(TornMessage, match="in the middle of a message"):
        raw[1].receive()


def test_an_end_between_messages_is_the_end(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall(PREFIX.pack(4, 0) + b"head")
    raw[0].close()
    assert raw[1].receive().head == b"head"
    with pytest.raises(ChannelEnded, match="between two messages"):
        raw[1].receive()


def test_other_words_than_chunks_are_no_message() -> None:
    sock, channel = raw_ends("shared")
    sock.sendall(PREFIX.pack(4, 3 * SMALL_CHUNK) + b"head\1\2")
    with pytest.raises(BadMessage, match="something else came"):
        channel.receive()
    sock.close()
    channel.close()


def test_a_claim_of_much_memory_costs_none(raw: tuple[socket.socket, Channel]) -> None:
    before = resident()
    raw[0].sendall(PREFIX.pack(4, 1 << 30) + b"head")
    raw[0].close()
    with pytest.raises(TornMessage):
        raw[1].receive()
    assert resident() - before < 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# the end


def test_messages_that_were_sent_before_the_end_arrive(ends: Ends) -> None:
    ends[0].send(b"last", b"words")
    ends[0].close()
    assert bytes(ends[1].receive().body) == b"words"
    for _ in range(2):
        with pytest.raises(ChannelEnded):
            ends[1].receive()


def test_hanging_up_wakes_whoever_waits(ends: Ends) -> None:
    """At both ends, in `receive` and in `send`."""
    with thread(ends[0].receive) as ours, thread(ends[1].receive) as theirs:
        ends[0].hang_up()
    assert isinstance(ours[0], ChannelEnded) and isinstance(theirs[0], ChannelEnded)
    with pytest.raises(ChannelEnded):
        ends[0].send(b"more")


@pytest.mark.parametrize("carrier", [name for name in CARRIERS if name != "paired"])
@pytest.mark.parametrize("who", [0, 1])
def test_hanging_up_ends_a_send_that_nobody_takes(carrier: str, who: int) -> None:
    ends = CARRIERS[carrier]()

    def place(head: bytes, nbytes: int) -> memoryview:
        ends[who].hang_up()
        return memoryview(bytearray(nbytes))

    with thread(ends[0].send, b"large", bytes(64 << 20)) as outcome:
        with pytest.raises(ChannelError):
            ends[1].receive(place)
        if who == 1:
            ends[1].close()  # over TCP a full window keeps the word from the sender until then
    assert isinstance(outcome[0], ChannelEnded)
    for end in ends:
        end.close()


@pytest.mark.parametrize("carrier", BETWEEN_PROCESSES)
@pytest.mark.parametrize("moment", ["sending", "receiving", "idle"])
def test_a_killed_peer_is_an_end_at_once(carrier: str, moment: str) -> None:
    """A real process, killed in the middle of a body larger than any buffer, or while it waits."""

    def work(channel: Channel) -> None:
        channel.send(b"here")
        if moment == "sending":
            channel.send(b"large", bytes(256 << 20))
        else:
            channel.receive(lambda head, nbytes: signal.pause())

    peer = Peer(carrier, work)
    assert peer.channel.receive().head == b"here"
    if moment == "sending":
        kinds: tuple[type[ChannelError], ...] = (TornMessage,)

        def place(head: bytes, nbytes: int) -> memoryview:
            peer.kill()
            return memoryview(bytearray(nbytes))

        call = lambda: peer.channel.receive(place)  # noqa: E731
    elif moment == "receiving":
        kinds = (ChannelEnded, TornMessage)
        with thread(peer.channel.send, b"large", bytes(256 << 20)) as outcome:
            peer.kill()
        call = lambda: _raise(outcome[0])  # noqa: E731
    else:
        kinds = (ChannelEnded,)
        peer.kill()
        call = peer.channel.receive
    with pytest.raises(kinds):
        call()
    assert peer.close() == -signal.SIGKILL


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("carrier", BETWEEN_PROCESSES)
def test_a_frozen_peer_goes_on_where_it_was(carrier: str) -> None:
    body = noise(5 << 20)

    def work(channel: Channel) -> None:
        for _ in range(3):
            channel.send(*channel.receive())

    peer = Peer(carrier, work)
    peer.stop()
    with thread(peer.channel.send, b"head", body):
        peer.resume()
        assert bytes(peer.channel.receive().body) == body
    for _ in range(2):
        with thread(peer.channel.send, b"again", body[:100]):
            assert bytes(peer.channel.receive().body) == body[:100]
    assert peer.close() == 0


# rings


def test_a_ring_does_not_break_at_its_end() -> None:
    fd = ring.make(SMALL_RING)
    found = ring.Ring(fd)
    os.close(fd)
    found.view(SMALL_RING - 3, 6)[:] = b"abcdef"
    assert bytes(found.view(0, 3)) == b"def" and bytes(found.view(2 * SMALL_RING - 3, 3)) == b"abc"


def test_the_memory_of_a_ring_goes_with_its_last_view() -> None:
    one, other = shared(SMALL_RING, SMALL_CHUNK)
    one.send(b"head", noise(1000))
    lent = other.receive().body
    one.close()
    other.close()
    del one, other
    gc.collect()
    assert bytes(lent) == noise(1000) and "paceline-ring" in maps()
    del lent
    gc.collect()
    assert "paceline-ring" not in maps()


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def test_memory_that_could_shrink_is_no_ring() -> None:
    fd = os.memfd_create("paceline-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALL_RING)
    with pytest.raises(ValueError, match="sealed"):
        ring.Ring(fd)
    os.ftruncate(fd, 1000)
    with pytest.raises(ValueError, match="cannot have 1000 bytes"):
        ring.Ring(fd)
    os.close(fd)


@pytest.mark.parametrize("opening", [(SMALL_CHUNK, 2), (SMALL_CHUNK, 0), (0, 3), (100, 3), (SMALL_RING, 3), (64, 3)])
def test_an_offer_that_makes_no_sense_is_refused(opening: tuple[int, int]) -> None:
    chunk, count = opening
    one, other = unix_sockets()
    extra, far = socket.socketpair()
    fds = [ring.make(SMALL_RING), ring.make(SMALL_RING), far.fileno()]
    wire.send(one, sharing.Rings(chunk), tuple(fds[:count]))
    with pytest.raises(BadMessage):
        sharing.accept(other)
    for fd in fds[:2]:
        os.close(fd)
    for sock in (one, other, extra, far):
        sock.close()


def test_where_there_is_no_memory_both_sides_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    one, other = unix_sockets()
    with pytest.raises(ResourceError, match="no shared memory"):
        sharing.offer(one)
    with pytest.raises(ResourceError, match="No space left"):
        sharing.accept(other)
    one.close()
    other.close()


# noise


@pytest.mark.parametrize("carrier", ["unix", "shared"])
def test_noise_has_an_end_that_is_expected(carrier: str, seed: int) -> None:
    dice, ends = random.Random(seed), 0
    for _ in range(3000):
        sock, channel = raw_ends(carrier)
        claim = struct.pack("<IQ", dice.choice([0, 3, 50, 1 << 20]), dice.choice([0, 7, 5000, 1 << 29, 1 << 62]))
        sock.sendall(dice.choice([b"", claim, claim]) + dice.randbytes(dice.randrange(200)))
        sock.close()
        try:
            while True:
                channel.receive()
        except ChannelError:
            ends += 1
        channel.close()
    assert ends == 3000
