"""Where a run's time goes, and how evenly it steps: the time from one step to the next, its median and the longest."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

_LAST = 1024


@dataclass
class TimeSplit:
    """Seconds of training, by what they were spent on; `compute` is the rest."""

    data: float = 0.0
    communication: float = 0.0
    wait: float = 0.0
    total: float = 0.0

    def as_dict(self) -> dict[str, float]:
        compute = max(0.0, self.total - self.data - self.communication - self.wait)
        parts = {
            "data": self.data,
            "compute": compute,
            "communication": self.communication,
            "wait": self.wait,
        }
        return {name: round(seconds, 4) for name, seconds in parts.items()}


class Gaps:
    """Within one loop over a loader: what a script does between two loops (an evaluation) is no gap."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last: deque[float] = deque(maxlen=_LAST)
        self._mark: float | None = None

    def begin(self) -> None:
        """A loop begins."""
        self._mark = time.perf_counter()

    def step(self, now: float) -> None:
        """A step is over, by `perf_counter`."""
        if self._mark is not None:
            gap = now - self._mark
            if gap > self.longest_s:
                self.longest_s = gap
            self._last.append(gap)
        self._mark = now

    @property
    def median_s(self) -> float:
        """Of the last thousand."""
        return statistics.median(self._last) if self._last else 0.0
