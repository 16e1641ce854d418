"""How tensors go from one process to another: a small head and a large body, both ways, one peer.

The head is a few hundred bytes that the caller has encoded; the body is raw bytes, none or hundreds of
megabytes. `send` gathers: what it is given is not joined first. `receive` is told by the caller, who has
seen the head, where the body belongs, and reads it straight to there; or lends it from memory of its own.
Nothing here looks into a head, and nothing is unpickled. A channel carries data: what agents and workers
say to each other about the run goes over other connections (`wires.wire`).

Two carriers: `streamed.StreamChannel` over a socket, to anywhere, and `sharing.SharedChannel` through rings
of shared memory, within a machine. `pair` makes the two ends of a third, inside one process, for tests.

An RDMA library would be a fourth file beside them. Its `send` posts head and body as one scatter-gather list
over memory that was registered at first sight and is kept so (a tensor that is pushed once is pushed again);
its `receive` has a few small receive buffers posted for heads, calls `place`, and lets the body come by an
RDMA read into what that names, so that a body is never met by a buffer that is too small for it. `release`
and the memory that is lent are the same as of a ring: registered once, given back when it is done with.
The connection is made and authenticated over a socket as for the others, and that socket stays: its end is
how a death is seen. Nothing above this protocol would change.
"""

from __future__ import annotations

import mmap
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

import torch

from paceline.tensors.memory import on_huge_pages

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous memory."""
Taken = Callable[[], None]
Place = Callable[[bytes, int], memoryview | None]
"""`place(head, nbytes)`: where the body goes, that many writable bytes; None: lend it."""

LARGEST_HEAD = 64 << 10
LARGEST_BODY = 2 << 30
"""Bytes. Whatever claims to be longer is no message."""
PREFIX = struct.Struct("<IQ")
"""Before each head: its length, and the body's."""
_KEPT = 16 << 20
"""Memory for bodies that are lent, which a channel keeps for the next one."""


class ChannelError(ConnectionError):
    """A channel that can no longer be used.

    ChannelError
    ├── ChannelEnded    the other side closed it, or is dead; between two messages
    ├── TornMessage     the same in the middle of one
    └── BadMessage      what came cannot be a message
    """


class ChannelEnded(ChannelError):
    pass


class TornMessage(ChannelError):
    pass


class BadMessage(ChannelError):
    pass


class Received(NamedTuple):
    head: bytes
    body: memoryview
    """What `place` named; or lent, until the next `receive` or `release`."""


def lend(head: bytes, nbytes: int) -> None:
    """The `Place` of one who wants to have every body lent."""


def left_alone() -> None:
    """The `taken` of one who leaves the buffers as they are for as long as anybody may read them, and needs not be told:
    until a call is answered, say."""


class Channel(Protocol):
    """One end. Any number of threads may send; one receives. None of it is raised by what other channels do."""

    def send(self, head: bytes, *buffers: Buffer, taken: Taken | None = None) -> None:
        """Once it returns, the buffers may be changed. Blocks while the other side does not take it.

        With `taken`, only once that was called, which it is in any case, by a thread inside a call here: what lies in
        memory of `lending` may be read where it lies until then."""

    def receive(self, place: Place = lend) -> Received:
        """The next message, once it is there. What `place` raises leaves the channel unusable."""

    def release(self) -> None:
        """The body that was lent is done with, so its memory may be written."""

    def hang_up(self) -> None:
        """End it for both sides, from any thread: whoever is inside a call here is woken by a `ChannelEnded`. A sender at the
        other end may be woken only when this one is closed."""

    def close(self) -> None:
        """Hang up and let go of everything, once nobody is inside a call."""


@contextmanager
def ending_with(taken: Taken | None) -> Iterator[None]:
    """A `send` that copies what it is given."""
    try:
        yield
    finally:
        if taken is not None:
            taken()


def byte_views(buffers: tuple[Buffer, ...]) -> list[memoryview]:
    """As bytes, without the empty ones."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    return [view for view in views if view.nbytes]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, as they are."""
    memory: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return memory


def prefix(head: bytes, nbytes: int) -> bytes:
    if not 0 < len(head) <= LARGEST_HEAD:
        raise ValueError(f"a head has 1 to {LARGEST_HEAD} bytes, not {len(head)}")
    if nbytes > LARGEST_BODY:
        raise ValueError(f"a body of {nbytes} bytes is over the limit of {LARGEST_BODY}")
    return PREFIX.pack(len(head), nbytes)


def lengths(raw: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Of head and body, if they can be."""
    head, body = PREFIX.unpack(raw)
    if not 0 < head <= LARGEST_HEAD or body > LARGEST_BODY:
        raise BadMessage(f"what came is no message: it claims a head of {head} bytes and a body of {body}")
    return head, body


def placed(place: Place, head: bytes, nbytes: int) -> memoryview | None:
    """Ask it, and check what it names."""
    where = place(head, nbytes)
    if where is None:
        return None
    where = where.cast("B")
    assert where.nbytes == nbytes and not where.readonly, "a body is placed into as many writable bytes as it has"
    return where


class Spare:
    """Memory for bodies that are lent: aligned, kept unless it is very large."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, nbytes: int) -> memoryview:
        # Pages of fresh memory are not there until they are written: a claim that nothing follows costs nothing.
        memory = self._memory
        if memory is None or len(memory) < nbytes:
            memory = on_huge_pages(nbytes)
            self._memory = memory if nbytes <= _KEPT else None
        return memoryview(memory)[:nbytes]


# inside one process


class PairedChannel:
    """One end of a `pair`: bodies are copied once, at `send`."""

    def __init__(self, out: queue.SimpleQueue[Received | None], into: queue.SimpleQueue[Received | None]) -> None:
        self._out, self._into = out, into
        self._over = threading.Event()
        self._other: PairedChannel | None = None

    def send(self, head: bytes, *buffers: Buffer, taken: Taken | None = None) -> None:
        with ending_with(taken):
            views = byte_views(buffers)
            prefix(head, sum(view.nbytes for view in views))
            if self._over.is_set():
                raise ChannelEnded("the channel is closed")
            self._out.put(Received(bytes(head), memoryview(bytearray(b"".join(views)))))

    def receive(self, place: Place = lend) -> Received:
        found = self._into.get()
        if found is None:
            self._into.put(None)  # it has ended for every later call, too
            raise ChannelEnded("the other side closed the channel")
        where = placed(place, found.head, found.body.nbytes) if found.body.nbytes else None
        if where is None:
            return found
        where[:] = found.body
        return Received(found.head, where)

    def release(self) -> None:
        pass

    def hang_up(self) -> None:
        for end in (self, self._other):
            if end is not None and not end._over.is_set():
                end._over.set()
                end._into.put(None)

    def close(self) -> None:
        self.hang_up()
        self._other = None


def pair() -> tuple[PairedChannel, PairedChannel]:
    """Both ends of a channel without a carrier.

    >>> ours, theirs = pair()
    >>> ours.send(b"head", b"bo", b"dy")
    >>> bytes(theirs.receive().body)
    b'body'
    """
    out: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
    into: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
    one, other = PairedChannel(out, into), PairedChannel(into, out)
    one._other, other._other = other, one
    return one, other
