"""Where a machine's agent is asked and answers: which worker is who, who waits for what. No torch in here."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.cluster.reception import Reception
from paceline.wires.connection import Connection
from paceline.wires.door import Door
from paceline.wires.messages import ANY

Key = tuple[str, int | str]
"""A question that waits for its answer: ("fact", name), ("after", term), ("view", term), ("join", worker), ("needed", worker),
("layout", number)."""


class Desk(Reception):
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
        super().__init__(door, selector, ANY)
        self._answer, self._known = answer, known
        self.worker_of: dict[Connection, int] = {}
        """Peers that have said which worker they are."""
        self.watchers: list[Connection] = []
        self.shadows: list[Connection] = []
        self._waiting: dict[Key, list[Connection]] = {}
        self._cut: set[int | None] = set()

    def take(self, peer: Connection, message: Any) -> None:
        self._answer(peer, message)

    def admits(self) -> bool:
        return None not in self._cut

    def forget(self, peer: Connection) -> None:
        self.worker_of.pop(peer, None)
        for peers in (self.watchers, self.shadows, *self._waiting.values()):
            if peer in peers:
                peers.remove(peer)

    def hear_worker(self, worker: int) -> None:
        """The last words of a worker that is dead come before its end."""
        for peer in [peer for peer, owner in self.worker_of.items() if owner == worker]:
            self.hear(peer)

    def cut(self, worker: int | None, off: bool) -> None:
        """Neither hear this worker (None: anybody) nor let it in, for the time being: a fault on purpose."""
        self._cut.add(worker) if off else self._cut.discard(worker)
        for peer in [p for p in self.peers if off and worker in (None, self.worker_of.get(p))]:
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
