"""Who is connected at a door, and what they say: what every agent does for whoever comes in. No torch in here."""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from typing import Any

from paceline.wires import wire
from paceline.wires.connection import Connection
from paceline.wires.door import Door


class NotNow(Exception):
    """The asker is sent away, and may ask again."""


class Reception(ABC):
    """Serves a door in a selector's loop; call `tick` often. `expected` says which messages may come."""

    def __init__(self, door: Door, selector: selectors.BaseSelector, expected: wire.Decoder) -> None:
        self._door, self._selector, self._expected = door, selector, expected
        self.peers: dict[Connection, None] = {}
        """Everybody who is connected, the longest first."""
        selector.register(door, selectors.EVENT_READ, lambda _: self._on_knock())

    @abstractmethod
    def take(self, peer: Connection, message: Any) -> None:
        """Deal with a message. ValueError: this peer has no business here, and its connection ends."""

    def admits(self) -> bool:
        """Whether anybody is let in at the moment."""
        return True

    @abstractmethod
    def forget(self, peer: Connection) -> None:
        """It is connected no more."""

    def _on_knock(self) -> None:
        for arrival in self._door.on_ready(time.monotonic()):
            if not self.admits():
                arrival.socket.close()
                continue
            peer = Connection(arrival.socket, self._expected, arrival.source)
            self.peers[peer] = None
            self._selector.register(peer, peer.events, self.hear)

    def hear(self, peer: Connection) -> None:
        """Whatever this peer has said so far."""
        peer.flush()
        try:
            for message, fds in peer.receive():
                wire.close_all(fds)
                self.take(peer, message)
        except NotNow:
            self.drop(peer)
        except ValueError as error:
            self._door.refusals.note(peer.source, str(error))
            self.drop(peer)

    def tick(self, now: float) -> list[str]:
        """Send on what waits, drop who has gone; in words, who was refused since the last time."""
        self._door.expire(now)
        for peer in list(self.peers):
            if peer.ended is not None:
                if peer.ended.foul:
                    self._door.refusals.note(peer.source, peer.ended.why)
                self.drop(peer)
            elif self._selector.get_key(peer).events != peer.events:
                self._selector.modify(peer, peer.events, self.hear)
        return [f"{source}: {why}" for source, why in self._door.refusals.untold()]

    def drop(self, peer: Connection) -> None:
        """Hang up; twice is once."""
        if peer in self.peers:
            self._selector.unregister(peer)
            del self.peers[peer]
            self.forget(peer)
            peer.close()

    def close(self) -> None:
        for peer in list(self.peers):
            peer.flush()
            self.drop(peer)
        self._selector.unregister(self._door)
        self._door.close()
