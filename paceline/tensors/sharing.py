"""A channel between two processes of one machine: bodies go through shared memory, everything else through sockets.

Each direction has a ring. The sender copies a body into it chunk by chunk, the receiver uses it there or copies
it to where it belongs, and both are at work at the same time. Nothing but a wake-up travels for a chunk:

    the channel's socket   ──▶ lengths and head, with which the first chunk is there; a byte for each further one
    the socket of returns  ◀── a byte for each chunk that may be overwritten, the oldest first

A body in memory of `lending` does not go through the ring: behind its head it is said where it lies, and it counts as a chunk
that takes nothing of the ring.

Lengths follow from the body's, so nothing that could be wrong is read from memory that the other side can write.
All waiting is in `recv`: a death is the end of a stream, at once. Bodies begin on a 64-byte boundary.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.errors import ResourceError
from paceline.tensors import ring
from paceline.tensors.channel import (
    LARGEST_HEAD,
    PREFIX,
    BadMessage,
    Buffer,
    ChannelEnded,
    ChannelError,
    Place,
    Received,
    Spare,
    Taken,
    TornMessage,
    byte_views,
    ending_with,
    left_alone,
    lend,
    lengths,
    placed,
    prefix,
)
from paceline.tensors.lending import Borrower, Lender, Spot, place_of
from paceline.tensors.onepass import copy_past_cache
from paceline.tensors.ring import Ring
from paceline.tensors.segment import aligned
from paceline.tensors.streamed import advance, hang_up
from paceline.wires import wire
from paceline.wires.messages import Refused

RING, CHUNK = 8 << 20, 1 << 20
"""Bytes. From 1 MB on libc copies past the cache: into memory that another core has last read that is 14 GB/s, and
8.5 GB/s with 512 KB. A larger ring is no faster, and over 16 MB slower at times (measured on two cores)."""
_SLOTS = 64
"""Chunks that may be in a ring at once: what is sent back for them always fits its socket."""
_BATCH = 16
"""Chunks after which it is said that they are free. With the bound on their bytes (one chunk's) a sender that waits
is always told: its ring is at least two chunks."""
_SPINS = 30
"""Looks before a sleep in the middle of a body, about as long as a chunk takes to copy."""
_MORE = b"\1"
_LENT_AT, _LENT = 3, 0x40


class Rings(msgspec.Struct, tag=True, frozen=True):
    """Beside it: the rings, first the one that its sender writes, and the receiver's end of the socket of returns."""

    chunk: int


_OPENING = wire.decoder(Rings | Refused)


def offer(sock: socket.socket, size: int = RING, chunk: int = CHUNK) -> SharedChannel:
    """Over a connected, authenticated Unix socket, which it takes over. The other side calls `accept`."""
    fds: list[int] = []
    ours, theirs = socket.socketpair()
    try:
        fds += [ring.make(size), ring.make(size)]
        channel = SharedChannel(sock, ours, Ring(fds[0]), Ring(fds[1]), chunk)
        wire.send(sock, Rings(chunk), (*fds, theirs.fileno()))
        return channel
    except BaseException as error:
        if isinstance(error, ResourceError):
            wire.send(sock, Refused(str(error)))
        ours.close()
        raise
    finally:
        theirs.close()
        wire.close_all(fds)


def accept(sock: socket.socket) -> SharedChannel:
    """The other end of what is offered."""
    opening, fds = wire.receive(sock, _OPENING)
    try:
        if isinstance(opening, Refused):
            raise ResourceError(opening.why)
        if len(fds) != 3:
            raise BadMessage(f"two rings and a socket were to come, not {len(fds)} descriptors")
        returns = socket.socket(fileno=os.dup(fds[2]))
        try:
            return SharedChannel(sock, returns, Ring(fds[1]), Ring(fds[0]), opening.chunk)
        except ValueError as error:
            returns.close()
            raise BadMessage(str(error)) from None
    finally:
        wire.close_all(fds)


class _Away(NamedTuple):
    """On its way to the other side: bytes of the ring, none of a body that is lent."""

    nbytes: int
    taken: Taken | None = None


class SharedChannel:
    def __init__(self, sock: socket.socket, returns: socket.socket, out: Ring, into: Ring, chunk: int) -> None:
        for one in (out, into):
            if not 0 < chunk <= one.size // 2 or chunk != aligned(chunk) or one.size > chunk * _SLOTS:
                raise ValueError(f"a ring of {one.size} bytes cannot have chunks of {chunk}")
        for each in (sock, returns):
            each.setblocking(True)
        self._socket, self._returns = sock, returns
        self._chunk, self._over = chunk, False
        self._sending = threading.Lock()
        """Guards the next five."""
        self._out, self._out_at = out, 0
        self._unreturned: deque[_Away] = deque()
        self._used = 0
        """Bytes of the ring that are in there."""
        self._lender, self._lent_out = Lender(), 0
        """How many bodies are lent to the other side by one who waits to be told that they are taken."""
        self._into, self._into_at = into, 0
        self._borrower = Borrower()
        self._lent: list[int] = []
        self._owed: list[int] = []
        """Chunks, by their bytes: of the body that is lent; done with, and not said so yet."""
        self._head = memoryview(bytearray(PREFIX.size + LARGEST_HEAD))
        self._spare = Spare()

    # out

    def send(self, head: bytes, *buffers: Buffer, taken: Taken | None = None) -> None:
        views = deque(byte_views(buffers))
        nbytes = sum(view.nbytes for view in views)
        words = prefix(head, nbytes) + head
        spot = place_of(views[0]) if taken is not None and len(views) == 1 else None
        if spot is not None:
            assert taken is not None
            self._lend(words, spot, taken)
            return
        with self._whole(), ending_with(taken):
            for size in self._cut(nbytes):
                self._make_room(aligned(size))
                _fill(self._out.view(self._out_at, size), views)
                self._out_at += aligned(size)
                self._unreturned.append(_Away(aligned(size)))
                self._used += aligned(size)
                self._socket.sendall(words)
                words = _MORE
            if not nbytes:
                self._socket.sendall(words)

    def _lend(self, words: bytes, spot: Spot, taken: Taken) -> None:
        with self._whole():
            try:
                self._make_room(0)
            except BaseException:
                taken()
                raise
            self._unreturned.append(_Away(0, taken))
            self._lent_out += taken is not left_alone
            self._lender.send(self._socket, as_lent(words), spot)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """While a message is sent, the only one."""
        with self._sending:
            try:
                yield
            except BaseException as error:
                # Half a message may be on its way: whatever followed would be taken for its rest.
                self.hang_up()
                if isinstance(error, OSError) and not isinstance(error, ChannelError):
                    raise self._ended() from None
                raise

    def _cut(self, nbytes: int) -> list[int]:
        """The chunks of a body."""
        whole, rest = divmod(nbytes, self._chunk)
        return [self._chunk] * whole + [rest] * bool(rest)

    def _make_room(self, size: int) -> None:
        while self._out.size - self._used < size or len(self._unreturned) == _SLOTS:
            self._take_back(_soon(self._returns, _SLOTS))

    def _take_back(self, returned: bytes) -> None:
        if not returned:
            raise self._ended()
        if len(returned) > len(self._unreturned):
            raise BadMessage("more was given back than was taken")
        for _ in returned:
            self._done_with(self._unreturned.popleft())

    def _done_with(self, away: _Away) -> None:
        self._used -= away.nbytes
        if away.taken is not None:
            self._lent_out -= away.taken is not left_alone
            away.taken()

    def _see_returns(self) -> None:
        """Until a message comes: whoever waits to hear that something was taken must not wait for the next one."""
        while self._lent_out:
            poll = select.poll()
            for each in (self._socket, self._returns):
                poll.register(each, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            # One who sends sees what comes back by himself, and may be waiting for what is received here.
            if self._socket.fileno() in ready or not self._sending.acquire(blocking=False):
                return
            try:
                # Somebody may have sent in between, and have seen them; an end is for the reader to find.
                returned = b""
                with contextlib.suppress(OSError):
                    returned = self._returns.recv(_SLOTS, socket.MSG_DONTWAIT)
                if not returned:
                    return
                self._take_back(returned)
            finally:
                self._sending.release()

    # in

    def receive(self, place: Place = lend) -> Received:
        self.release()
        self._see_returns()
        start = self._head[: PREFIX.size]
        self._read(start, ChannelEnded)
        is_lent = was_lent(start)
        size, nbytes = lengths(start)
        self._read(self._head[:size])
        head = bytes(self._head[:size])
        if not nbytes:
            return Received(head, memoryview(b""))
        where = placed(place, head, nbytes)
        if is_lent:
            return Received(head, self._borrow(nbytes, where))
        if where is None and aligned(nbytes) <= self._into.size:
            return Received(head, self._in_place(nbytes))
        body = self._spare.take(nbytes) if where is None else where
        self._copy_out(body)
        return Received(head, body)

    def _borrow(self, nbytes: int, where: memoryview | None) -> memoryview:
        try:
            body = self._borrower.receive(self._socket, nbytes)
        except OSError as error:
            raise error if isinstance(error, ChannelError) else self._ended(TornMessage) from None
        self._lent = [0]
        if where is None:
            return body
        copy_home(where, body)
        self.release()
        return where

    def _in_place(self, nbytes: int) -> memoryview:
        sizes = self._cut(nbytes)
        missing = len(sizes) - 1
        while missing:
            missing -= self._further(missing)
        self._lent = [aligned(size) for size in sizes]
        body = self._into.view(self._into_at, nbytes)
        self._into_at += sum(self._lent)
        return body

    def _copy_out(self, body: memoryview) -> None:
        there, at = 1, 0
        sizes = self._cut(body.nbytes)
        for number, size in enumerate(sizes):
            if not there:
                there = self._further(min(len(sizes) - number, _SLOTS))
            copy_home(body[at : at + size], self._into.view(self._into_at, size))
            self._into_at, at, there = self._into_at + aligned(size), at + size, there - 1
            self._give_back([aligned(size)])

    def _further(self, most: int) -> int:
        """Wait for further chunks of the body in hand; how many have come."""
        self._say_owed()  # the sender may need them for these
        try:
            said = _soon(self._socket, most)
        except OSError:
            said = b""
        if not said or self._over:
            raise self._ended(TornMessage)
        if said.count(_MORE) != len(said):
            raise BadMessage("something else came where the chunks of a body were due")
        return len(said)

    def _read(self, view: memoryview, end: type[ChannelError] = TornMessage) -> None:
        """Until it is full. `end`: what it is called if nothing comes at all."""
        while view.nbytes:
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError:
                count = 0
            if not count or self._over:
                raise self._ended(end)
            view, end = view[count:], TornMessage

    def release(self) -> None:
        lent, self._lent = self._lent, []
        self._give_back(lent)

    def _give_back(self, chunks: list[int]) -> None:
        self._owed += chunks
        if sum(self._owed) >= self._chunk or len(self._owed) >= _BATCH or 0 in chunks:
            self._say_owed()

    def _say_owed(self) -> None:
        if self._owed:
            with contextlib.suppress(OSError):  # it is gone; what it has sent before can still be received
                self._returns.sendall(_MORE * len(self._owed))
            self._owed.clear()

    # the end

    def _ended(self, kind: type[ChannelError] = ChannelEnded) -> ChannelError:
        if self._over:
            return ChannelEnded("the channel is closed")
        where = "in the middle of a message" if kind is TornMessage else "between two messages"
        return kind(f"the other side ended the channel {where}")

    def hang_up(self) -> None:
        self._over = True
        hang_up(self._socket)
        hang_up(self._returns)

    def close(self) -> None:
        """What is lent stays mapped until it is let go of."""
        self.hang_up()
        while self._unreturned:
            self._done_with(self._unreturned.popleft())
        self._socket.close()
        self._returns.close()


def as_lent(words: bytes) -> bytes:
    """The prefix of a body that is lent says so by a bit that no head's length has."""
    return words[:_LENT_AT] + bytes([words[_LENT_AT] | _LENT]) + words[_LENT_AT + 1 :]


def was_lent(start: memoryview) -> bool:
    """And no longer says so."""
    lent = bool(start[_LENT_AT] & _LENT)
    start[_LENT_AT] &= ~_LENT & 0xFF
    return lent


def _soon(sock: socket.socket, most: int) -> bytes:
    """What comes, for which a short while is worth it: to wake one who sleeps costs the other side more than a byte."""
    for _ in range(_SPINS):
        with contextlib.suppress(BlockingIOError):
            return sock.recv(most, socket.MSG_DONTWAIT)
        os.sched_yield()
    return sock.recv(most)


def _fill(room: memoryview, views: deque[memoryview]) -> None:
    """With what comes next, out of as many of them as it takes."""
    while room.nbytes:
        count = min(room.nbytes, views[0].nbytes)
        copy(room[:count], views[0][:count])
        advance(views, count)
        room = room[count:]


def copy(into: memoryview, out_of: memoryview) -> None:
    """By libc's memmove, as a memoryview's own; but numpy lets other threads run meanwhile."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(out_of, dtype=np.uint8))


def copy_home(into: memoryview, out_of: memoryview) -> None:
    """The same for a body that is copied to where it belongs, and is large: who reads it next does not find it in a cache
    anyway. Into a ring it is no faster (13.8 and 14.1 ms, 14.7 and 15.9: measured in turns)."""
    target, source = np.frombuffer(into, dtype=np.uint8), np.frombuffer(out_of, dtype=np.uint8)
    if target.nbytes < CHUNK or not copy_past_cache(target, source):
        np.copyto(target, source)
