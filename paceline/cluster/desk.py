"""Where a leader is asked and answers: who is connected, who waits for what. No torch in here."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.cluster import wire
from paceline.cluster.connection import Connection
from paceline.cluster.door import Door
from paceline.cluster.messages import ANY

Key = tuple[str, int | str]
"""A question that waits for its answer: ("fact", name), ("after", term), ("view", term), ("join", worker), ("needed", worker)."""


class NotNow(Exception):
    """The asker is sent away, and may ask again."""


class Desk:
    """`answer(peer, message)` deals with each message; ValueError from it ends the peer's connection.

    `known(key)` is the answer to a question, once there is one.
    """

    def __init__(
        self,
        door: Door,
        selector: selectors.BaseSelector,
        answer: Callable[[Connection, Any], None],
        known: Callable[[Key], msgspec.Struct | None],
    ) -> None:
        self._selector, self._answer, self._known = selector, answer, known
        self._door = door
        selector.register(self._door, selectors.EVENT_READ, lambda door: self._on_knock())
        self.worker_of: dict[Connection, int] = {}
        """Every peer; -1 for one that is no worker, or has not said."""
        self.watchers: list[Connection] = []
        self.shadows: list[Connection] = []
        self._waiting: dict[Key, list[Connection]] = {}
        self._cut: set[int | None] = set()

    def _on_knock(self) -> None:
        for arrival in self._door.on_ready(time.monotonic()):
            if None in self._cut:
                arrival.socket.close()
                continue
            peer = Connection(arrival.socket, ANY, arrival.source)
            self.worker_of[peer] = -1
            self._selector.register(peer, peer.events, self.hear)

    def hear(self, peer: Connection) -> None:
        """Whatever this peer has said so far."""
        peer.flush()
        try:
            for message, fds in peer.receive():
                wire.close_all(fds)
                self._answer(peer, message)
        except NotNow:
            self.drop(peer)
        except ValueError as error:
            self._door.refusals.note(peer.source, str(error))
            self.drop(peer)

    def hear_worker(self, worker: int) -> None:
        """The last words of a worker that is dead come before its end."""
        for peer in [peer for peer, owner in self.worker_of.items() if owner == worker]:
            self.hear(peer)

    def tick(self, now: float) -> list[str]:
        """Send on what waits, drop who has gone; in words, who was refused since the last time."""
        self._door.expire(now)
        for peer in list(self.worker_of):
            if peer.ended is not None:
                if peer.ended.foul:
                    self._door.refusals.note(peer.source, peer.ended.why)
                self.drop(peer)
            elif self._selector.get_key(peer).events != peer.events:
                self._selector.modify(peer, peer.events, self.hear)
        return [f"{source}: {why}" for source, why in self._door.refusals.untold()]

    def drop(self, peer: Connection) -> None:
        if peer not in self.worker_of:
            return
        self._selector.unregister(peer)
        del self.worker_of[peer]
        for peers in (self.watchers, self.shadows, *self._waiting.values()):
            if peer in peers:
                peers.remove(peer)
        peer.close()

    def cut(self, worker: int | None, off: bool) -> None:
        """Neither hear this worker (None: anybody) nor let it in, for the time being: a fault on purpose."""
        self._cut.add(worker) if off else self._cut.discard(worker)
        for peer in [p for p, owner in self.worker_of.items() if off and worker in (None, owner)]:
            self.drop(peer)

    def is_cut(self, worker: int) -> bool:
        return worker in self._cut

    # questions

    def wait(self, peer: Connection, key: Key) -> None:
        """Answer this once the answer is known; that may be now."""
        self._waiting.setdefault(key, []).append(peer)
        self.settle()

    def settle(self) -> None:
        """Something has become known: answer who waited for it."""
        for key in list(self._waiting):
            answer = self._known(key)
            if answer is not None:
                for peer in self._waiting.pop(key):
                    peer.send(answer)

    def close(self) -> None:
        for peer in list(self.worker_of):
            peer.flush()
            self.drop(peer)
        self._selector.unregister(self._door)
        self._door.close()
