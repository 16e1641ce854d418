"""What is known of the rounds so far: who took part, and how far the replicas had come apart. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Met:
    """
    >>> met = Met()
    >>> met.add(3, [])
    >>> met.add(2, [0.25, 0.5])
    >>> met.report(0.125)
    {'rounds': 2, 'participants': {'2': 1, '3': 1}, 'drift': {'last': 0.125, 'mean': 0.3125, 'most': 0.5}}
    """

    participants: dict[int, int] = field(default_factory=dict)
    """In how many rounds there were so many."""
    drifts: int = 0
    sum: float = 0.0
    most: float = 0.0
    """Of the rounds whose drift is known, by the replica that was farthest from the mean."""

    def add(self, participants: int, drifts: Sequence[float]) -> None:
        """A round is over; this is how far each replica was from the mean in the one before, if there was one."""
        self.participants[participants] = self.participants.get(participants, 0) + 1
        if drifts:
            drift = max(drifts)
            self.drifts, self.sum, self.most = self.drifts + 1, self.sum + drift, max(self.most, drift)

    @property
    def rounds(self) -> int:
        return sum(self.participants.values())

    def report(self, last: float) -> dict[str, Any]:
        """With the drift of the last round, of which nobody has told yet."""
        if not self.rounds:
            return {"rounds": 0}
        mean = (self.sum + last) / (self.drifts + 1)
        drift = {"last": last, "mean": mean, "most": max(self.most, last)}
        return {
            "rounds": self.rounds,
            "participants": {str(count): self.participants[count] for count in sorted(self.participants)},
            "drift": {name: round(value, 6) for name, value in drift.items()},
        }

    def capture(self) -> list[Any]:
        return [sorted(self.participants.items()), self.drifts, self.sum, self.most]

    @classmethod
    def restored(cls, captured: list[Any]) -> Met:
        participants, *drifts = captured
        return cls(dict(map(tuple, participants)), *drifts)
