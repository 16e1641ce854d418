"""How far a donor may go ahead of a newcomer that follows it. Pure: the clock is an argument.

What comes of the donor's meetings waits in its memory until the newcomer has taken it. A newcomer that is
not much slower must come closer all the time, or it would follow for ever; one that stands still for a
moment (its first step may take long) must not hold the others up. So the donor slows down to half the pace
at which the newcomer takes things, as it did lately; and stops only where its memory would not do.
"""

from __future__ import annotations

from collections import deque

NEAR = 2
"""A newcomer with no more than so many entries left to take is as good as there; its donor goes at its own pace."""
_ROOM = 256 << 20
_SLOWER = 2
"""A donor that is far ahead meets once while the newcomer takes so many entries,"""
_PATIENCE = 4.0
"""and waits for that no longer than the newcomer lately needed for so many."""
_SMOOTH = 0.2


class Pace:
    def __init__(self, state_bytes: int) -> None:
        self._most = max(_ROOM, 2 * state_bytes)
        self._begun = False
        self._waiting: deque[int] = deque()
        """Bytes of each entry that was not taken yet."""
        self._bytes = 0
        self._taken_at: float | None = None
        self._usual: float | None = None
        """Seconds that the newcomer lately needed for an entry; None: it has not begun to take any."""
        self._met_at, self._since = 0.0, 0
        """The donor's last meeting, and the entries taken since."""

    def put(self, nbytes: int, now: float) -> None:
        """The donor has met."""
        self._waiting.append(nbytes)
        self._bytes += nbytes
        self._met_at, self._since = now, 0

    def taken(self, now: float) -> None:
        """The newcomer has taken the state, or then the next entry."""
        if not self._begun:
            self._begun = True
            return
        self._bytes -= self._waiting.popleft()
        self._since += 1
        if self._taken_at is not None:
            last = now - self._taken_at
            self._usual = last if self._usual is None else (1 - _SMOOTH) * self._usual + _SMOOTH * last
        self._taken_at = now

    @property
    def behind(self) -> int:
        """Entries that are still to be taken."""
        return len(self._waiting)

    @property
    def near(self) -> bool:
        """Whether a newcomer that is sent an entry now will be as good as there with it. What it has not taken may be
        anywhere: the kernels on the way hold megabytes, and over a thin link that is seconds."""
        return self._begun and self.behind <= NEAR + 1

    def may_meet(self, now: float) -> bool:
        """Whether the donor may go to its next meeting now."""
        if self._bytes > self._most:
            return False
        if self.behind <= NEAR or self._usual is None or self._since >= _SLOWER:
            return True
        return now - self._met_at >= _PATIENCE * self._usual
