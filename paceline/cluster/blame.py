"""Whose fault an exception is: its worker's, or the script's. Pure. No torch in here.

One exception does not tell: the machine may be broken, or the script. So the run goes on without the first
worker that raises, and another one computes what it was at. If that one raises the same there, it is the
script's, and the run ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

MOST = 3
"""So many exceptions of a run may be their workers' own fault."""
_LONGEST = 300
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Addresses, process ids, free bytes: what differs between two workers that say the same."""


class Raised(msgspec.Struct, frozen=True):
    """An exception that has ended a worker while it trained."""

    worker: int
    said: str
    """Its type and message, in one line."""
    step: int
    slot: int = -1
    """Whose share was in hand; -1: none."""

    @staticmethod
    def of(worker: int, summary: str, step: int, slot: int) -> Raised:
        """An exception that came from a loader's process has a whole traceback as its message: the last line says it."""
        said = summary.strip().splitlines()[-1:] or [""]
        return Raised(worker, said[0].strip()[:_LONGEST], step, slot)

    @property
    def place(self) -> str:
        return f"step {self.step}" + (f", slot {self.slot}" if self.slot >= 0 else "")

    def same_as(self, other: Raised) -> bool:
        """The same words at the same place.

        >>> Raised(1, "KeyError: <A at 0x7f01>", 17, 3).same_as(Raised(2, "KeyError: <A at 0x7fe2>", 17, 3))
        True
        """
        alike = _VARYING.sub("#", self.said) == _VARYING.sub("#", other.said)
        return alike and (self.step, self.slot) == (other.step, other.slot)


def why_it_ends(known: Sequence[Raised], now: Raised, others: int) -> str | None:
    """Why the run ends with this exception, in words if there is something to say; None: it goes on without the worker.

    `others`: how many workers would remain.
    """
    for earlier in known:
        if earlier.same_as(now):
            return f"worker {earlier.worker} raised it too, at {earlier.place}"
    if not others:
        return ""
    if len(known) >= MOST:
        *first, last = [str(earlier.worker) for earlier in known]
        return f"workers {', '.join(first)} and {last} were lost to exceptions before, and that is enough"
    return None
