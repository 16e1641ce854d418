"""Where a script is among its loops. Pure.

Whoever goes on from another process's state runs the script from its top. It passes over the loops that the other one had behind
it, ended or left by `break`, and goes on in the one that was in hand.

>>> course = Course()
>>> for feed in (0, 1):
...     assert not course.is_behind(feed, era_of_epoch(4))
...     course.begin()
>>> newcomer = Course()
>>> newcomer.restore(course.capture())
>>> newcomer.is_behind(STEPS, era_of_steps(asked=0), limit=100)  # a warm-up
True
>>> newcomer.is_behind(0, era_of_epoch(4)), newcomer.is_behind(1, era_of_epoch(4))
(True, False)
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

STEPS = -1
"""In place of a feed's number: a loop over `run.steps()`."""


def era_of_epoch(epoch: int) -> int:
    return 2 * epoch + 1


def era_of_steps(asked: int) -> int:
    """Of loops over `run.steps()` behind so many epochs that were asked for, and before the next ones."""
    return 2 * asked


class _Place(NamedTuple):
    era: int
    feed: int
    limit: int
    """n of `run.steps(n)`, which is the run's step at its end: a script may come to one of these or not, by where it is."""
    nth: int
    """Of the era's loops with these."""

    def comes_before(self, goal: _Place) -> bool:
        if self.era != goal.era:
            return self.era < goal.era
        if (self.feed, self.limit) != (goal.feed, goal.limit):
            return True  # another loader's, or to another step: the one that was in hand is still to come
        return self.nth < goal.nth


class Course:
    def __init__(self) -> None:
        self._era, self._counts = -1, Counter[tuple[int, int]]()
        self._here: _Place | None = None
        """The loop that has begun last."""
        self._is_over = self._has_begun = False
        self._goal: _Place | None = None
        """Of whoever this process goes on from."""

    def is_behind(self, feed: int, era: int, limit: int = 0) -> bool:
        """The script comes to a loop: whether that is behind it already."""
        if era != self._era:
            self._era, self._counts = era, Counter()
        self._counts[feed, limit] += 1
        here, goal = _Place(era, feed, limit, self._counts[feed, limit]), self._goal
        if goal is not None and here.comes_before(goal):
            return True
        self._goal = None
        if here == goal and self._is_over:
            return True
        self._here, self._is_over = here, False
        return False

    def begin(self) -> None:
        """It is in that loop."""
        self._has_begun = True

    def over(self) -> None:
        """It has ended, or was left."""
        self._is_over = True

    def capture(self) -> list[Any]:
        return [None if self._here is None else list(self._here), self._is_over]

    def restore(self, state: list[Any]) -> None:
        """Not where this process has been in a loop already: then it is where the others are."""
        if not self._has_begun:
            here, self._is_over = state
            self._here = self._goal = None if here is None else _Place(*here)
