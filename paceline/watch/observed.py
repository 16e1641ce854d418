"""What was observed of workers that meet at servers, from a run's summary: how stale, who waited for whom, who took part. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.watch.lines import compact

Row = tuple[str, ...]
_WIDTH = 40
"""Of the longest bar."""


def observed(summary: Mapping[str, Any]) -> list[list[Row]]:
    """Tables; none of what a run does not know."""
    tables = [
        _staleness(summary.get("staleness") or {}),
        _waits(summary.get("waits") or {}),
        _rounds(summary.get("by_round") or []),
    ]
    return [table for table in tables if table]


def _staleness(pulls: Mapping[str, int]) -> list[Row]:
    """How many pulls were how many steps ahead of the slowest worker, as bars.

    >>> for row in _staleness({"0": 30, "2": 10}):
    ...     print(row)
    ('staleness', 'pulls', '')
    ('0', '30', '########################################')
    ('1', '0', '')
    ('2', '10', '#############')
    """
    if not pulls:
        return []
    counts = {int(steps): count for steps, count in pulls.items()}
    most = max(counts.values())
    bars = {steps: "#" * (counts.get(steps, 0) * _WIDTH // most) for steps in range(max(counts) + 1)}
    return [
        ("staleness", "pulls", ""),
        *((str(steps), f"{counts.get(steps, 0):,}", bar) for steps, bar in bars.items()),
    ]


def _waits(waits: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """A row for each worker that waited, a column for each that was waited for.

    >>> for row in _waits({"0": {"2": 7.25}, "1": {"0": 0.5, "2": 7.0}}):
    ...     print(*row, sep=" | ")
    waited for | worker 0 | worker 2
    worker 0 |  | 7.25 s
    worker 1 | 0.50 s | 7.00 s
    """
    slow = sorted({int(other) for of in waits.values() for other in of})
    if not slow:
        return []
    rows = [
        (
            f"worker {worker}",
            *(f"{waits[worker][str(other)]:.2f} s" if str(other) in waits[worker] else "" for other in slow),
        )
        for worker in sorted(waits, key=int)
    ]
    return [("waited for", *(f"worker {other}" for other in slow)), *rows]


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Who counted in each, who had dropped out, and who came too late or had no data here.

    >>> each = {"round": 0, "clients": [0, 1, 2, 4], "dropped": [3], "lacking": [], "samples": 1200, "bytes": 2_500_000}
    >>> for row in _rounds([each]):
    ...     print(*row, sep=" | ")
    round | clients | dropped out | late or lacking | samples | moved
    0 | 0-2,4 | 3 |  | 1,200 | 2.5 MB
    """
    if not rounds:
        return []
    rows = [
        (
            str(each["round"]),
            *(compact(sorted(each[kind])) for kind in ("clients", "dropped", "lacking")),
            f"{each['samples']:,}",
            f"{each['bytes'] / 1e6:,.1f} MB",
        )
        for each in rounds
    ]
    return [("round", "clients", "dropped out", "late or lacking", "samples", "moved"), *rows]
