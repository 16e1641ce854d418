"""The shell of a server: it admits callers, and a thread for each reads, has the call handled, and answers.

Whoever is idle, frozen, slow or made to wait holds up its own thread and nobody else. A call that makes no sense
is refused with a sentence, and the connection goes on; what is no message at all ends the connection it came by.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from paceline.errors import ResourceError
from paceline.tensors import sharing
from paceline.tensors.channel import Buffer, Channel, ChannelEnded
from paceline.tensors.streamed import StreamChannel, hang_up
from paceline.wires import wire
from paceline.wires.door import Arrival, Door, Refusals, Secured
from paceline.wires.telling import tell, tell_exception

_TICK_S = 0.1
_LONGEST = 2000
"""Characters of a refusal."""


class Opening(msgspec.Struct, tag=True, frozen=True):
    """A caller's first words, before there is a channel."""

    name: str
    shared: bool
    """Whether bodies are to go through shared memory."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """An answer to a call that cannot be done as it is."""

    why: str


@dataclass(frozen=True, eq=False)
class Caller:
    """One connection."""

    name: str
    """As it calls itself."""
    source: str
    """Where it is, in words."""


class Answer(NamedTuple):
    message: msgspec.Struct
    buffers: Sequence[Buffer] = ()
    sent: Callable[[], None] | None = None
    """Called when the buffers are no longer needed, whether they have arrived or not."""


Handle: TypeAlias = Callable[[Caller, Any, memoryview], Answer | tuple[msgspec.Struct, Sequence[Buffer]]]
"""`handle(caller, message, body)`, in the caller's thread: it may wait. A ValueError is a refusal.

The body is lent until it returns: no buffer of the answer may be a part of it.
"""


Meter: TypeAlias = Callable[[int, int], None]
"""`meter(received, sent)`: the bytes of one call and its answer."""


def attend(
    channel: Channel, caller: Caller, expected: wire.Decoder, handle: Handle, meter: Meter = lambda received, sent: None
) -> None:
    """Answer one caller until the channel ends, which is a `ChannelError`."""
    while True:
        head, body = channel.receive()
        received = len(head) + body.nbytes
        try:
            answer = Answer(*handle(caller, wire.decode(head, expected), body))
        except ValueError as error:
            answer = Answer(Refusal(str(error)[:_LONGEST]))
        del body
        channel.release()  # now, not at the next call: the caller may be sending that already
        said = msgspec.msgpack.encode(answer.message)
        # Before it is sent: who has the last answer may look at what was counted.
        meter(received, len(said) + sum(memoryview(buffer).nbytes for buffer in answer.buffers))
        channel.send(said, *answer.buffers, taken=answer.sent)


class _Connection:
    """A caller's socket, then its channel; hung up from another thread at any moment."""

    def __init__(self, arrival: Arrival) -> None:
        self.source, self._socket = arrival.source, arrival.socket
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._over = False

    def open(self) -> tuple[Caller, Channel]:
        self._socket.settimeout(wire.HANDSHAKE_S)
        opening, fds = wire.receive(self._socket, _OPENINGS)
        wire.close_all(fds)
        if opening.shared and self._socket.family != socket.AF_UNIX:
            raise ValueError("it wants shared memory, and is not known to be on this machine")
        channel: Channel = sharing.offer(self._socket) if opening.shared else StreamChannel(self._socket)
        with self._lock:
            self._channel = channel
            if self._over:
                channel.hang_up()
        return Caller(opening.name, self.source), channel

    def hang_up(self) -> None:
        with self._lock:
            self._over = True
            if self._channel is not None:
                self._channel.hang_up()
            else:
                hang_up(self._socket)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._socket.close()


_OPENINGS = wire.decoder(Opening)


class Serving:
    """Takes over listening sockets (`wire.listen`, `wire.listen_tcp`). One that other machines reach needs `secured`.

    `messages` is the union of what may be said.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        secret: bytes,
        messages: Any,
        handle: Handle,
        secured: Secured | None = None,
        meter: Meter = lambda received, sent: None,
    ) -> None:
        self._expected, self._handle, self._meter = wire.decoder(messages), handle, meter
        self._doors = [
            Door(sock, secret, time.monotonic(), None if sock.family == socket.AF_UNIX else secured)
            for sock in listening
        ]
        self._lock = threading.Lock()
        """Guards the next three."""
        self._broken = Refusals()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._admit, name="paceline-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody and wait for their threads. End what handlers wait for before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        with self._lock:
            left = dict(self._connections)
        for connection in left:
            connection.hang_up()
        for thread in left.values():
            thread.join()
        self._selector.close()
        for door in self._doors:
            door.close()
        os.close(self._bell)

    def _admit(self) -> None:
        while not self._closed:
            self._selector.select(_TICK_S if any(door.restless for door in self._doors) else None)
            now = time.monotonic()
            for door in self._doors:
                for arrival in door.on_ready(now):
                    self._begin(_Connection(arrival))
                door.expire(now)
                for source, why in door.refusals.untold():
                    tell(f"refused a connection from {source}: {why}")

    def _begin(self, connection: _Connection) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="paceline-caller", daemon=True)
        with self._lock:
            self._connections[connection] = thread
        thread.start()

    def _serve(self, connection: _Connection) -> None:
        try:
            caller, channel = connection.open()
            attend(channel, caller, self._expected, self._handle, self._meter)
        except ChannelEnded:
            pass
        except (OSError, ValueError, ResourceError) as error:  # it broke off, or talks nonsense
            self._note(connection.source, str(error))
        except Exception:  # noqa: BLE001  a mistake of ours costs the connection it came up in
            tell_exception()
        with self._lock:
            del self._connections[connection]
            connection.close()

    def _note(self, source: str, why: str) -> None:
        """Each source is told of once."""
        with self._lock:
            self._broken.note(source, why)
            new = [] if self._closed else self._broken.untold()
        for source, why in new:
            tell(f"ended the connection from {source}: {why}")
