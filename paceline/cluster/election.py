"""Who may lead a run on several machines, and for how long: judged by silence, on each one's own clock. Pure.

Clocks are not compared, only their lengths of time. A leader puts beats into the store; a candidate looks at them.

    Silence   a candidate may try to lead once it has seen the same (fence, beat) for a lease. It counts from the
              *end* of the look that found the pair first to the *beginning* of the one that found it last.
    Tenure    a leader may act for a lease, less a margin, from when it *began* to send its last beat that was
              answered in time. An answer that comes after the tenure has passed does not bring it back.
    Leave     a leader that goes for good acts no more, and then gives the lead to nobody: a fence of its own, of no
              process (`NOBODY`). Who sees that need not wait.

So no two ever act at once. Say a candidate's first look ended at T and its last one began at T + lease. No beat
has come into the store in between; the leader began to send its last one before T, and its tenure has passed
before T + lease. A beat that is heard later still is answered later still, and brings nothing back. Whatever
then happens to the candidate on its way to the store, it takes over from one that acts no more; and if that one
has gone already, the fence has moved and the candidate's attempt fails.

The margin covers what this leaves out: clocks that run at different speeds, and the time between asking whether
the tenure holds and the last effect of what is done on that. For a leader that is frozen just there, no margin is
enough: what it does to the store is fenced, and what it says to others carries its fence. No torch in here.
"""

from __future__ import annotations

import time

from paceline.cluster.store import Record

_MARGIN = 0.1
"""Of a lease. Clocks differ by 0.1 % at most (the kernel corrects one by no more than 0.05 %), which takes 0.002
of it; the rest is for the leader to act in: 0.29 s of a lease of 3 s, about three turns of its loop."""
_BEATS = 6
"""In a lease: several may be lost before the leader must step down."""


NOBODY = 0
"""The process of a leader that there is not."""


def clock() -> float:
    """Seconds that also pass while the machine sleeps: a leader that wakes up must not take itself for one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Silence:
    """A candidate's judgement of the leader."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._pair = (-1, -1)
        self._since = 0.0

    def saw(self, began: float, ended: float, record: Record) -> bool:
        """After each look into the store, with when it began and ended: whether to try to lead, after `record.fence`."""
        if (record.fence, record.beat) != self._pair:
            self._pair, self._since = (record.fence, record.beat), ended
        return record.pid == NOBODY or began - self._since >= self._lease_s


class Tenure:
    """A leader's judgement of itself."""

    def __init__(self, lease_s: float, sent: float) -> None:
        """`sent`: when it began to ask for the lead that it was given."""
        self._every_s, self._length_s = lease_s / _BEATS, lease_s * (1 - _MARGIN)
        self._sent, self._until = sent, sent + self._length_s

    def renew(self, sent: float, now: float) -> None:
        """A beat or a write has been answered just `now`."""
        if self.holds(now) and sent > self._sent:
            self._sent, self._until = sent, sent + self._length_s

    def holds(self, now: float) -> bool:
        """Whether it may act. Once this is false it stays so: step down."""
        return now < self._until

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next beat."""
        return now >= self._sent + self._every_s
