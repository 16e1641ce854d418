"""On whom a run waits, in one line. Pure: rows of the board in, words out."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.wires.board import Phase, Seen

QUIET_S = 5.0
"""Nothing waits in silence for longer."""
START_QUIET_S = 15.0
"""Before anybody's first step: imports, data and the first kernels take as long as they do."""

_WAITING = (Phase.REDUCE, Phase.WAITING_FOR_MAIN)


def verdict(rows: Sequence[Seen]) -> tuple[int, str] | None:
    """(the worker that is waited for, a sentence about it), or None while nothing is amiss."""
    starting = [row for row in rows if row.phase == Phase.STARTING and row.since_s > QUIET_S]
    if starting and len(starting) == len(rows):
        row = starting[0]
        return row.worker, f"all workers are still starting after {row.since_s:.0f} s"
    short = [row for row in rows if row.phase == Phase.REFILL and row.since_s > QUIET_S]
    if short:
        row = short[0]
        who = _names([row.worker for row in short])
        return row.worker, f"{who} waited {row.since_s:.0f} s for a worker in place of a lost one (step {row.step})"
    quiet_s = QUIET_S if any(row.step for row in rows) else START_QUIET_S
    waiting = [row for row in rows if _waits(row) and row.since_s > quiet_s]
    if not waiting:
        return None
    longest = max(waiting, key=lambda row: row.since_s)
    laggard = _last(longest, rows)
    if laggard is None:
        return None
    who = _names([row.worker for row in waiting])
    if _waits(laggard):
        words = "have been exchanging with each other" if len(waiting) > 1 else "has been exchanging with the others"
        return (
            longest.worker,
            f"{who} {words} for {longest.since_s:.0f} s (step {longest.step}): the link between them is slow, or cut",
        )
    place = f", in {laggard.place}" if laggard.place and laggard.phase == Phase.SCRIPT else ""
    return laggard.worker, (
        f"{who} waited {longest.since_s:.0f} s for worker {laggard.worker}, which has been {laggard.phase.words} "
        f"for {laggard.since_s:.0f} s (step {laggard.step}){place}"
    )


def stuck(rows: Sequence[Seen], limit_s: float) -> int | None:
    """The worker that does not go on: others have waited for it for so long, and it has done nothing else all the while. Not
    before its first step, nor while somebody starts: that takes as long as it does."""
    if not limit_s or any(not row.step for row in rows):
        return None
    for waiting in rows:
        laggard = _laggard(waiting, rows) if _waits(waiting) and waiting.since_s > limit_s else None
        if laggard is not None and not _waits(laggard) and laggard.since_s > limit_s:
            return laggard.worker
    return None


def _waits(row: Seen) -> bool:
    return row.phase in _WAITING or row.waits_for is not None


def _last(waiting: Seen, rows: Sequence[Seen]) -> Seen | None:
    """Whom this one waits for, or whom that one waits for, and so on; who waits itself, where they wait for each other."""
    passed: set[int] = set()
    last: Seen | None = waiting
    while last is not None and _waits(last) and last.worker not in passed:
        passed.add(last.worker)
        last = _laggard(last, rows)
    return last


def _laggard(waiting: Seen, rows: Sequence[Seen]) -> Seen | None:
    if waiting.phase == Phase.WAITING_FOR_MAIN:
        return rows[0] if rows[0].worker != waiting.worker else None
    if waiting.waits_for is not None:
        return next((row for row in rows if row.worker == waiting.waits_for), None)
    busy = [row for row in rows if not _waits(row) and row.phase not in (Phase.FINISHED, Phase.FAILED)]
    return max(busy, key=lambda row: row.since_s, default=None)


def _names(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return "workers " + ", ".join(map(str, workers))
