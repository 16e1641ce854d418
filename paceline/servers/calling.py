"""The side that calls a server: many calls under way at once, answered in the order they were made.

A thread for each connection reads the answers whatever else is going on, so two sides that both send can never
wait for each other. What is under way is bounded: a server that is slow is not flooded, its caller waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from paceline.servers.serving import Opening, Refusal
from paceline.tensors import sharing
from paceline.tensors.channel import BadMessage, Buffer, Channel, ChannelEnded, ChannelError, left_alone, prefix
from paceline.tensors.streamed import StreamChannel
from paceline.wires import wire

UNDER_WAY = 64 << 20
"""Bytes on a line that are not answered yet, more only for a call that is larger by itself."""


_FAR_S = 3.0
"""How long another machine is waited for: it may be cut off, and who waits may have to hear of that."""


Made = TypeVar("Made")


class RefusedError(ValueError):
    """The server refused a call, and says why."""


class Reply(NamedTuple):
    message: Any
    body: memoryview
    """The memory that was given, if it went there."""


def dial(address: str, secret: bytes, name: str, shared: bool | None = None) -> Channel:
    """A channel to the server at an address of `wire`: through shared memory if that is on this machine."""
    near = "://" not in address
    if shared is None:
        shared = near
    sock = wire.connect(address, secret) if near else wire.connect(address, secret, _FAR_S)
    try:
        wire.send(sock, Opening(name, shared))
        return sharing.accept(sock) if shared else StreamChannel(sock)
    except BaseException:
        sock.close()
        raise


def _as_it_is(reply: Reply) -> Reply:
    return reply


@dataclass(eq=False)
class _Call(Generic[Made]):
    nbytes: int
    into: memoryview | None
    turn: Callable[[Reply], Made]
    future: Future[Made] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # it is said: it cannot be unsaid

    def answer(self, reply: Reply) -> None:
        if isinstance(reply.message, Refusal):
            self.future.set_exception(RefusedError(reply.message.why))
            return
        try:
            found = self.turn(reply)
        except Exception as error:  # noqa: BLE001  whoever waits for it is to have it
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class Line:
    """Calls over one channel, from any thread. `replies` is the union of what may be answered."""

    def __init__(self, channel: Channel, replies: Any, server: str = "the server", under_way: int = UNDER_WAY) -> None:
        self._channel, self._server, self._most = channel, server, under_way
        self._expected = wire.decoder(replies | Refusal)
        self._order = threading.Lock()
        """Held while a call is sent: calls are sent in the order in which they wait for their answers."""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._waiting: deque[_Call[Any]] = deque()
        self._under_way = 0
        self._over = ""
        """Why, once it is."""
        self._reader = threading.Thread(target=self._read, name="paceline-answers", daemon=True)
        self._reader.start()

    @property
    def over(self) -> bool:
        """Whether it is closed, or has broken."""
        return bool(self._over)

    def call(self, message: msgspec.Struct, *buffers: Buffer, into: memoryview | None = None) -> Future[Reply]:
        """Waits until it is on its way; the buffers may be changed then, those in memory of `lending` when it is answered. An
        answer's body goes to `into` if it is of that size, which is the answer's until then. A refusal is a RefusedError, a
        lost server a ConnectionError."""
        return self.turned(_as_it_is, message, *buffers, into=into)

    def turned(
        self, turn: Callable[[Reply], Made], message: msgspec.Struct, *buffers: Buffer, into: memoryview | None = None
    ) -> Future[Made]:
        """The same, and what comes of it is what `turn` makes of the answer."""
        head = msgspec.msgpack.encode(message)
        call = _Call(sum(memoryview(buffer).nbytes for buffer in buffers), into, turn)
        prefix(head, call.nbytes)  # what is too long is told before anything is said
        with self._order:
            if self._begin(call):
                try:
                    self._channel.send(head, *buffers, taken=left_alone)
                except ChannelError as error:
                    self._end(error)
                except BaseException:
                    self._channel.hang_up()  # the call waits for an answer that will never come
                    raise
        return call.future

    def _begin(self, call: _Call[Any]) -> bool:
        with self._changed:
            while not self._over and self._waiting and self._under_way + call.nbytes > self._most:
                self._changed.wait()
            if self._over:
                call.future.set_exception(ConnectionError(self._over))
                return False
            self._waiting.append(call)
            self._under_way += call.nbytes
            return True

    def _read(self) -> None:
        try:
            while True:
                head, body = self._channel.receive(self._place)
                reply = Reply(wire.decode(head, self._expected), body)
                with self._changed:
                    if not self._waiting:
                        raise BadMessage("an answer to no call came")
                    call = self._waiting.popleft()
                    self._under_way -= call.nbytes
                    self._changed.notify_all()
                call.answer(reply)
                del call, reply, body
        except (OSError, ValueError) as error:
            self._end(error)

    def _place(self, head: bytes, nbytes: int) -> memoryview:
        with self._changed:
            into = self._waiting[0].into if self._waiting else None
        if into is not None and into.nbytes == nbytes:
            return into
        return np.empty(nbytes, dtype=np.uint8).data

    def _end(self, error: Exception) -> None:
        """Once: everybody who waits is told."""
        with self._changed:
            if self._over:
                return
            self._over = f"the connection to {self._server} has ended: {error}"
            lost = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._channel.hang_up()
        for call in lost:
            call.future.set_exception(ConnectionError(self._over))

    def close(self) -> None:
        """Calls that are not answered yet are lost."""
        self._end(ChannelEnded("it was closed here"))
        self._reader.join()
        with self._order:
            self._channel.close()


class Lines:
    """Several lines to one server, by lane. Only calls of the same lane keep their order."""

    def __init__(self, channels: Sequence[Channel], replies: Any, server: str = "the server") -> None:
        self._lines = [Line(channel, replies, server) for channel in channels]

    def __getitem__(self, lane: int) -> Line:
        return self._lines[lane % len(self._lines)]

    def close(self) -> None:
        for line in self._lines:
            line.close()
