"""Memory that is lent: the other process reads it where it lies, and says when it is done with it."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.tensors import lending, sharing
from paceline.tensors.channel import PREFIX, BadMessage, Channel, TornMessage, left_alone, memory_of
from paceline.tensors.sharing import SharedChannel
from tests.tensors.carriers import CARRIERS, SMALL_CHUNK, SMALL_RING, Peer, shared, thread, unix_sockets

COUNT = lending.SMALLEST // 4
"""Floats."""
Ends = tuple[SharedChannel, SharedChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = shared(SMALL_RING, SMALL_CHUNK)
    yield found
    for end in found:
        end.close()


def lent(first: float = 0.0, count: int = COUNT) -> torch.Tensor:
    tensor = lending.empty((count,), torch.float32)
    assert lending.place_of(memory_of(tensor)) is not None, "the system has no memory to lend"
    return tensor.copy_(torch.arange(first, first + count))


def as_tensor(body: memoryview) -> torch.Tensor:
    return torch.frombuffer(body, dtype=torch.float32)


@pytest.mark.parametrize("carrier", list(CARRIERS))
@pytest.mark.parametrize("placed", [False, True])
def test_what_is_lent_arrives_by_every_carrier(carrier: str, placed: bool) -> None:
    one, other = CARRIERS[carrier]()
    values, into, calls = lent(), torch.zeros(COUNT), list[int]()

    def send() -> None:
        one.send(b"head", memory_of(values), taken=lambda: calls.append(1))

    with thread(send):
        head, body = other.receive((lambda head, nbytes: memory_of(into)) if placed else lambda head, nbytes: None)
        assert head == b"head" and torch.equal(as_tensor(body), values)
        assert not placed or torch.equal(into, values)
    other.close()
    one.close()
    assert calls == [1], "it is told once, whatever happens"


def test_it_is_not_copied(ends: Ends) -> None:
    """It is larger than the ring, and nobody receives while it is sent; what changes is seen at the other side."""
    values = lent()
    ends[0].send(b"head", memory_of(values), taken=left_alone)
    body = as_tensor(ends[1].receive().body)
    values[7] = -1.0
    assert body[7] == -1.0


def test_it_is_taken_when_it_is_given_back(ends: Ends) -> None:
    taken: list[int] = []
    for number in range(3):
        ends[0].send(b"head", memory_of(lent(number)), taken=lambda number=number: taken.append(number))  # type: ignore[misc]
    for number in range(3):
        with thread(ends[0].receive) as received:  # it hears of what was taken while it waits for something else
            assert as_tensor(ends[1].receive().body)[0] == number
            assert taken == list(range(len(taken))) and len(taken) <= number, "this one is still being read"
            ends[1].release()
            ends[1].send(b"answer")
        assert received[0].head == b"answer"
    ends[0].send(b"last")
    ends[0].close()
    assert taken == [0, 1, 2]


def test_a_waiting_lender_hears_of_it_before_the_next_message(ends: Ends) -> None:
    read, write = os.pipe()
    ends[0].send(b"head", memory_of(lent()), taken=lambda: (os.write(write, b"!"), None)[1])
    with thread(ends[0].receive):
        ends[1].receive()
        ends[1].release()
        assert os.read(read, 1) == b"!", "nothing else has come"
        ends[1].send(b"answer")
    os.close(read)
    os.close(write)


def test_more_may_be_lent_than_there_are_slots(ends: Ends) -> None:
    values = lent(count=200 * COUNT)

    def send() -> None:
        for number in range(200):
            ends[0].send(b"%d" % number, memory_of(values[number * COUNT : (number + 1) * COUNT]), taken=left_alone)
            ends[0].send(b"between", b"x" * (number * 40))

    with thread(send):
        for number in range(200):
            assert as_tensor(ends[1].receive().body)[0] == number * COUNT
            assert ends[1].receive().body.nbytes == number * 40


def test_who_does_not_say_how_long_is_copied(ends: Ends) -> None:
    values = lent()
    with thread(ends[0].send, b"head", memory_of(values)):
        body = ends[1].receive().body
        values[7] = -1.0
        assert as_tensor(body)[7] == 7.0


def mapped(name: str = "paceline-lent") -> int:
    with open("/proc/self/maps") as file:
        return sum(name in line for line in file)


def test_blocks_go_when_nothing_of_them_is_used(ends: Ends) -> None:
    """At both sides: the other one is told with the next body."""
    before = mapped()
    for number in range(5):
        values = lent(number, (64 << 20) // 4 + 1)  # a block of its own
        ends[0].send(b"head", memory_of(values), taken=left_alone)
        assert as_tensor(ends[1].receive().body)[0] == number
        ends[1].release()
        ends[0].send(b"read")
        ends[1].receive()
        del values
        gc.collect()
    assert mapped() - before <= 4


def test_what_a_killed_process_has_lent_is_still_whole() -> None:
    values = lent(3.0)

    def work(channel: Channel) -> None:
        channel.send(b"head", memory_of(values), taken=left_alone)
        channel.receive()

    peer = Peer("shared", work)
    body = as_tensor(peer.channel.receive().body)
    peer.kill()
    assert peer.close() == -signal.SIGKILL
    assert torch.equal(body, torch.arange(3.0, 3.0 + COUNT))


def test_the_other_side_cannot_write_to_it() -> None:
    values = lent()
    spot = lending.place_of(memory_of(values))
    assert spot is not None
    with pytest.raises(PermissionError):
        mmap.mmap(spot.block.fd, spot.block.size)


REFERENCE = struct.Struct("<IIQ")


@pytest.mark.parametrize("said", [(1, 0, 0), (1, 1, 0), (0, 0, 2**63)])
def test_a_body_that_lies_nowhere_is_no_message(said: tuple[int, int, int]) -> None:
    raw, channel = raw_end()
    raw.sendall(sharing.as_lent(PREFIX.pack(1, 64) + b"h") + REFERENCE.pack(*said))
    with pytest.raises(BadMessage, match="lies nowhere"):
        channel.receive()
    raw.close()
    channel.close()


@pytest.mark.parametrize("offset", [4096, 4096 - 63, 2**63])
def test_a_body_beyond_its_block_is_no_message(offset: int) -> None:
    raw, channel = raw_end()
    block = lending.Block(4096)
    raw.sendall(sharing.as_lent(PREFIX.pack(1, 64) + b"h"))
    socket.send_fds(raw, [REFERENCE.pack(1, 0, offset)], [block.fd])
    with pytest.raises(BadMessage, match="lies nowhere"):
        channel.receive()
    block.close()
    raw.close()
    channel.close()


def test_memory_that_could_shrink_is_not_borrowed() -> None:
    raw, channel = raw_end()
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    raw.sendall(sharing.as_lent(PREFIX.pack(1, 64) + b"h"))
    socket.send_fds(raw, [REFERENCE.pack(1, 0, 0)], [fd])
    with pytest.raises(BadMessage, match="sealed"):
        channel.receive()
    os.close(fd)
    raw.close()
    channel.close()


def test_an_end_before_it_is_said_where_it_lies_is_a_torn_message() -> None:
    raw, channel = raw_end()
    raw.sendall(sharing.as_lent(PREFIX.pack(1, 64) + b"h") + b"\0" * 5)
    raw.close()
    with pytest.raises(TornMessage):
        channel.receive()
    channel.close()


def raw_end() -> tuple[socket.socket, Channel]:
    """A socket whose other end is a channel."""
    one, other = unix_sockets()
    with thread(sharing.offer, other, SMALL_RING, SMALL_CHUNK) as offered:
        sharing.accept(one)._returns.close()
    return one, offered[0]


def test_large_copies_are_the_same_bytes() -> None:
    """As they are: a signalling NaN stays one."""
    dice = np.random.default_rng(0)
    for nbytes in (sharing.CHUNK, sharing.CHUNK + 64, sharing.CHUNK + 1):
        source = dice.integers(0, 256, nbytes + 64, dtype=np.uint8)
        source[:8] = np.frombuffer(struct.pack("<II", 0x7F800001, 1), dtype=np.uint8)
        for shift in (0, 1):
            target = np.zeros(nbytes + 64, dtype=np.uint8)
            sharing.copy(target.data[shift : shift + nbytes], source.data[:nbytes])
            assert np.array_equal(target[shift : shift + nbytes], source[:nbytes])
            assert not target[shift + nbytes :].any()
