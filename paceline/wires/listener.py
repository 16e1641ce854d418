"""A worker's door for other workers: open for its whole life, on a port that the kernel chose.

Whoever comes in says in one message what for, its *label*. A `Call` is parked until this worker wants
it: the others may be in the next group before this one is. Any other kind of label is for whoever
serves it. One thread does all this; it sleeps while nobody comes. No torch in here.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import msgspec

from paceline.wires import wire
from paceline.wires.calling import tune
from paceline.wires.door import Door
from paceline.wires.telling import tell, tell_exception
from paceline.wires.tls import Identity
from paceline.wires.wire import HANDSHAKE_S, LENGTH

_TICK_S = 0.1
_SLICE_S = 0.01
_LARGEST = 4096
"""No label is longer, in bytes."""
_PARKED = 4096
"""Calls that may wait; then the oldest is dropped."""
_OVER = 256
"""Groups of which it is remembered that they are over."""


class Call(msgspec.Struct, tag=True, frozen=True):
    """From the worker of this rank in the group of this name."""

    group: str
    rank: int


Label = TypeVar("Label", bound=msgspec.Struct)
Handler = Callable[[Any, socket.socket], None]


@dataclass(eq=False)
class _Guest:
    """One who has proved himself and not said yet what for."""

    socket: socket.socket
    source: str
    deadline: float
    heard: bytearray = field(default_factory=bytearray)

    def read(self) -> bytearray | None:
        """The label's bytes, once they are there. Never a byte more: what follows is not ours to read."""
        while (wanted := self._wanted()) > 0:
            try:
                data = self.socket.recv(wanted)
            except BlockingIOError:
                return None
            if not data:
                raise wire.ConnectionClosed("it went away before it said what for")
            self.heard += data
        return self.heard[LENGTH.size :]

    def _wanted(self) -> int:
        if len(self.heard) < LENGTH.size:
            return LENGTH.size - len(self.heard)
        (length,) = LENGTH.unpack_from(self.heard)
        if length > _LARGEST:
            raise ValueError(f"a label of {length} bytes is over the limit")
        return LENGTH.size + int(length) - len(self.heard)


class Listener:
    """`host`: an address of this machine that the other workers reach. TLS unless it is a loopback one;
    with `identity` always, and by that certificate."""

    def __init__(self, host: str, secret: bytes, identity: Identity | None = None) -> None:
        server = wire.listen_tcp(host)
        place, port = server.getsockname()[:2]
        try:
            if identity is None and not wire.is_loopback(place):
                identity = Identity.make()
        except BaseException:
            server.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{'tls' if identity else 'tcp'}://{shown}:{port}"
        """What the others call."""
        self._door = Door(server, secret, time.monotonic(), identity)
        self._guests: set[_Guest] = set()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._parked: dict[Call, socket.socket] = {}
        self._over: deque[str] = deque(maxlen=_OVER)
        self._handlers: dict[type[msgspec.Struct], Handler] = {Call: self._park}
        self._expected = wire.decoder(Call)
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="paceline-listener", daemon=True)
        self._thread.start()

    # the worker's side

    def take(self, label: Call, check: Callable[[], None]) -> socket.socket:
        """The connection of this label, once it is there. `check` is called every 10 ms and ends the wait by raising."""
        while True:
            with self._changed:
                if label not in self._parked and not self._closed:
                    self._changed.wait(_SLICE_S)
                if label in self._parked:
                    return self._parked.pop(label)
                if self._closed:
                    raise wire.ConnectionClosed("the listener is closed")
            check()

    def forget(self, group: str) -> None:
        """This group is over: whoever calls for it, now or later, is hung up on."""
        with self._changed:
            self._over.append(group)
            for label in [label for label in self._parked if label.group == group]:
                self._parked.pop(label).close()

    def serve(self, kind: type[Label], handler: Callable[[Label, socket.socket], None]) -> None:
        """From now on whoever comes with this kind of label (a tagged struct) is given to the handler, with
        a connection that does not block and is the handler's to close. It is called in the listener's
        thread and must not wait there."""
        with self._changed:
            self._handlers[kind] = handler
            self._expected = wire.decoder(reduce(or_, self._handlers))

    def close(self) -> None:
        """Everything but what was taken is closed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for sock in [*self._parked.values(), *(guest.socket for guest in self._guests)]:
            sock.close()
        self._selector.close()
        self._door.close()
        os.close(self._bell)

    # the thread

    def _serve(self) -> None:
        while not self._closed:
            tick = _TICK_S if self._guests or self._door.restless else None
            for key, _ in self._selector.select(tick):
                if isinstance(key.data, _Guest):
                    self._hear(key.data)
            now = time.monotonic()
            for arrival in self._door.on_ready(now):
                self._let_in(_Guest(arrival.socket, arrival.source, now + HANDSHAKE_S))
            self._door.expire(now)
            for guest in [guest for guest in self._guests if guest.deadline <= now]:
                self._send_away(guest, "it did not say what for in time")
            for source, why in self._door.refusals.untold():
                tell(f"refused a connection from {source}: {why}")

    def _let_in(self, guest: _Guest) -> None:
        tune(guest.socket)
        self._guests.add(guest)
        self._selector.register(guest.socket, selectors.EVENT_READ, guest)
        self._hear(guest)  # under TLS its words may be here already, and the kernel would not say so

    def _hear(self, guest: _Guest) -> None:
        try:
            payload = guest.read()
            label = None if payload is None else wire.decode(payload, self._expected)
        except (OSError, ValueError) as error:  # it left, or talks nonsense
            self._send_away(guest, str(error))
            return
        if label is None:
            return
        self._let_go(guest)
        try:
            self._handlers[type(label)](label, guest.socket)
        except Exception:  # noqa: BLE001  the door stays open whatever one visitor leads to
            tell_exception()
            guest.socket.close()

    def _park(self, label: Call, sock: socket.socket) -> None:
        with self._changed:
            stale = sock if label.group in self._over else self._parked.pop(label, None)
            if stale is not sock:
                if len(self._parked) >= _PARKED:
                    self._parked.pop(next(iter(self._parked))).close()
                self._parked[label] = sock
                self._changed.notify_all()
        if stale is not None:
            stale.close()

    def _let_go(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._selector.unregister(guest.socket)

    def _send_away(self, guest: _Guest, why: str) -> None:
        self._let_go(guest)
        guest.socket.close()
        self._door.refusals.note(guest.source, why)
