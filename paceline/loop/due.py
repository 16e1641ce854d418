"""At which steps a run's periodic checkpoints are written. Pure: all workers come to the same."""

from __future__ import annotations

from typing import NamedTuple


class Due(NamedTuple):
    """What is known of that behind a step.

    One that would fall where a loop over a loader ends is put off to the next boundary: a run that went on from
    there would have nothing left of that loop, and names that only its body sets would not be there.

    >>> due, written = Due(), []
    >>> for step in range(1, 12):
    ...     due = due.behind(step, every=3, ends=step in (5, 6, 10))
    ...     written += [step] * due.now
    >>> written
    [3, 7, 9]
    """

    step: int = 0
    """Of the last boundary."""
    put_off: bool = False
    now: bool = False
    ends: bool = False
    """Whether a loop ends at that boundary: nothing is written there, what is owed neither."""

    def behind(self, step: int, every: int, ends: bool) -> Due:
        """Once this step is over; with whether a loop ends here that will be entered again."""
        due = bool(every) and (self.put_off or step // every > self.step // every)
        return Due(step, due and ends, due and not ends, ends)
