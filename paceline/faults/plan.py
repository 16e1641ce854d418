"""What goes wrong, whom it hits, and when: `kill worker:2 @step 120`, `kill main @time 20s`. Pure.

A kill is a SIGKILL, as from an out-of-memory killer. `main` is whoever speaks for the run at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.board import Seen
from paceline.errors import UsageError

_FORM = re.compile(
    r"kill +(?:worker:(?P<worker>\d+)|(?P<main>main)) +@(?:step +(?P<step>\d+)|time +(?P<time>[\d.]+)s)$"
)


@dataclass(frozen=True)
class Fault:
    text: str
    worker: int | None
    """None: main."""
    step: int | None
    time_s: float | None

    @staticmethod
    def parse(text: str) -> Fault:
        """
        >>> Fault.parse("kill worker:2 @step 120").step
        120
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"--fault {text!r}: say what, whom and when, such as 'kill worker:2 @step 120' or 'kill main @time 20s'"
            )
        worker, step, seconds = found["worker"], found["step"], found["time"]
        return Fault(
            text.strip(),
            None if worker is None else int(worker),
            None if step is None else int(step),
            None if seconds is None else float(seconds),
        )

    def due(self, rows: Sequence[Seen], seconds: float) -> int | None:
        """The worker to hit now, if it is time. `rows`: the members, main's first."""
        row = rows[0] if self.worker is None else next((row for row in rows if row.worker == self.worker), None)
        if row is None:
            return None
        reached = row.step >= self.step if self.step is not None else seconds >= (self.time_s or 0.0)
        return row.worker if reached else None
