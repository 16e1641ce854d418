"""Where a script is among its loops. Pure.

Whoever goes on from another process's state runs the script from its top. It passes over the loops that the other one had behind
it, ended or left by `break`, and goes on in the one that was in hand.

>>> course = Course()
>>> for feed in (0, 1):
...     assert not course.is_behind(feed, epoch=4)
...     course.begin()
>>> newcomer = Course()
>>> newcomer.restore(course.capture())
>>> newcomer.is_behind(0, epoch=4), newcomer.is_behind(1, epoch=4)
(True, False)
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

STEPS = -1
"""In place of a feed's number: a loop over `run.steps()`."""


class _Place(NamedTuple):
    feed: int
    epoch: int
    nth: int
    """Of the loops over it in this epoch; of those over `run.steps()`, in the script."""


class Course:
    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._here: _Place | None = None
        """The loop that has begun last."""
        self._is_over = self._has_begun = False
        self._goal: _Place | None = None
        """Of whoever this process goes on from."""

    def is_behind(self, feed: int, epoch: int) -> bool:
        """The script comes to a loop: whether that is behind it already."""
        self._counts[feed] += 1
        here, goal = _Place(feed, epoch, self._counts[feed]), self._goal
        if goal is not None and here != goal and not (feed == goal.feed and here > goal) and epoch <= goal.epoch:
            return True
        self._goal = None
        if goal is not None and here == goal and self._is_over:
            return True
        self._here, self._is_over = here, False
        return False

    def begin(self) -> None:
        """It is in that loop."""
        self._has_begun = True

    def over(self) -> None:
        """It has ended, or was left."""
        self._is_over = True

    def epoch_done(self) -> None:
        self._counts = Counter({STEPS: self._counts[STEPS]})

    def capture(self) -> list[Any]:
        return [None if self._here is None else list(self._here), self._is_over]

    def restore(self, state: list[Any]) -> None:
        """Not where this process has been in a loop already: then it is where the others are."""
        if not self._has_begun:
            here, self._is_over = state
            self._here = self._goal = None if here is None else _Place(*here)
