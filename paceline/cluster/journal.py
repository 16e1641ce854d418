"""What a leader has decided and knows: written to the store before anybody is told, so that the next
leader goes on where it stopped. No torch in here."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.board import Stop
from paceline.cluster.membership import Instruction, Membership, Publish, Start, View


class Failure(msgspec.Struct):
    """Why the run ends before its time."""

    who: str
    text: str
    trace: str
    exit_code: int
    worker: int
    at: float


class Journal(msgspec.Struct):
    membership: Membership
    started: float
    """On the machine's monotonic clock."""
    views: dict[int, View]
    after: dict[int, int] = {}
    """For each term, that of the view that followed the first death in it."""
    facts: dict[str, str] = {}
    """What workers have told for the others."""
    places: dict[int, int] = {}
    """Which of the first workers each one stands for: whose GPU it has."""
    pids: dict[int, int] = {}
    exits: dict[int, int] = {}
    """Exit codes of the workers that have ended."""
    deaths: int = 0
    failure: Failure | None = None
    stop: Stop = Stop.NONE
    killed: str = ""
    """Why all were killed."""
    faults: dict[str, Any] = {}
    """How far the plan of faults has come."""

    @staticmethod
    def begin(workers: int, spares: int, starts_left: int, now: float) -> Journal:
        membership = Membership.begin(workers, starts_left, spares)
        places = {number: number for number in membership.standing}
        return Journal(membership, now, {1: membership.settled}, places=places)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(raw: bytes) -> Journal:
        return msgspec.msgpack.decode(raw, type=Journal)

    def enter(self, instructions: list[Instruction]) -> list[View]:
        """Note down what the membership has decided; its new views."""
        fresh = []
        for instruction in instructions:
            match instruction:
                case Publish(view, agreed, _):
                    fresh.append(view)
                    self.views[view.term] = view
                    if not agreed:
                        for term in range(1, view.term):
                            self.after.setdefault(term, view.term)
                case Start(number, _):
                    self.places[number] = self._free_place()
        return fresh

    def _free_place(self) -> int:
        taken = {place for number, place in self.places.items() if number not in self.exits}
        return next(place for place in range(len(self.places) + 1) if place not in taken)

    @property
    def running(self) -> list[int]:
        """Workers that have been started, or are about to be, and have not ended."""
        return [number for number in self.places if number not in self.exits]
