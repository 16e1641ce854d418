"""Who may go on, and on whom others wait. Pure: time is an argument.

A worker's clock is the step to which what it has in hand belongs: micro-batches are handed out in the order of steps, to
whoever is free. Its staleness is how far that is ahead of the oldest that anybody has in hand when it pulls: of no step
before that is a push missing. A mode says how much of it is allowed:

    ps              Sync        none: a step's pushes all come before anybody's next pull
    async           Async       any
    ssp:s           Bounded     s steps
    dssp:low,high   Adaptive    low steps, and up to high while that is predicted to shorten the wait
    ps+backup:k     Backup      none; but the k slots that are expected last are computed twice, so k may be late
    ps+rows:s       RowsBehind  none; but rows may be read s of their updates behind (`may_read`)

Whoever is slowest may always go on. So nobody waits in a circle, and all that wait do so for a worker that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.errors import UsageError

BEHIND = 3
"""Where shares are computed twice, a worker may be so many steps behind the others: servers keep what it still asks for."""
_SMOOTH = 0.5
"""The weight of the last step in a worker's pace. Single slow steps mislead a prediction from the last one alone."""


@dataclass(frozen=True)
class Sync:
    def __str__(self) -> str:
        return "ps"


@dataclass(frozen=True)
class Async:
    def __str__(self) -> str:
        return "async"


@dataclass(frozen=True)
class Bounded:
    most: int

    def __str__(self) -> str:
        return f"ssp:{self.most}"


@dataclass(frozen=True)
class Adaptive:
    low: int
    high: int

    def __str__(self) -> str:
        return f"dssp:{self.low},{self.high}"


@dataclass(frozen=True)
class Backup:
    slots: int

    def __str__(self) -> str:
        return f"ps+backup:{self.slots}"


@dataclass(frozen=True)
class RowsBehind:
    most: int

    def __str__(self) -> str:
        return f"ps+rows:{self.most}"


Mode = Sync | Async | Bounded | Adaptive | Backup | RowsBehind
_ROWS = "for rows that are read at most 2 updates behind"

_MODES: dict[str, tuple[type[Mode], int, str]] = {
    "ps": (Sync, 0, "ps"),
    "async": (Async, 0, "async"),
    "ssp": (Bounded, 1, "ssp:3, for at most 3 steps ahead of the slowest worker"),
    "dssp": (Adaptive, 2, "dssp:1,8, for 1 to 8 steps ahead of the slowest worker"),
    "ps+backup": (Backup, 1, "ps+backup:1, for 1 slot that is computed twice"),
    "ps+rows": (RowsBehind, 1, f"ps+rows:2, {_ROWS}"),
    "central": (Sync, 0, "central"),
    "central+rows": (RowsBehind, 1, f"central+rows:2, {_ROWS}"),
}
"""name → (mode, how many numbers it takes, how it is written)."""


def parse(text: str) -> Mode:
    """The mode that a user wrote.

    >>> parse("dssp:1,8")
    Adaptive(low=1, high=8)
    >>> parse("ssp")
    Traceback (most recent call last):
    paceline.errors.UsageError: 'ssp' is no mode of the servers; write ssp:3, for at most 3 steps ahead of the slowest worker
    """
    name, colon, rest = text.partition(":")
    if name not in _MODES:
        raise UsageError(f"{text!r} is no mode of the servers; there are: {', '.join(_MODES)}")
    mode, count, example = _MODES[name]
    numbers = rest.split(",") if colon else []
    if len(numbers) != count or not all(number.isascii() and number.isdigit() for number in numbers):
        raise UsageError(f"{text!r} is no mode of the servers; write {example}")
    found = mode(*map(int, numbers))
    if isinstance(found, Adaptive) and found.low > found.high:
        raise UsageError(f"{text!r} has its bounds the wrong way round; write dssp:{found.high},{found.low}")
    if found == Backup(0):
        raise UsageError(f"{text!r} computes nothing twice; write ps, or {example}")
    return found


@dataclass(frozen=True)
class Decision:
    go: bool
    why: str
    waits_for: int | None = None


def may_pull(mode: Mode, clocks: Mapping[int, int], worker: int, until: int = 0) -> Decision:
    """Whether a worker may pull now, given the clocks of the living; `until` is the clock to which `Adaptive` has let it
    go ahead.

    >>> may_pull(Bounded(3), {0: 9, 1: 5}, worker=0)
    Decision(go=False, why='worker 1 is 4 steps behind, and ssp:3 allows 3', waits_for=1)
    """
    slowest = min(clocks, key=lambda other: (clocks[other], other))
    stale = clocks[worker] - clocks[slowest]
    if not stale:
        return Decision(True, "nobody is behind")
    match mode:
        case Async():
            return Decision(True, f"{mode} waits for nobody")
        case Backup(slots):
            late = sum(clock < clocks[worker] for clock in clocks.values())
            behind = f"{late} {'worker is' if late == 1 else 'workers are'} behind, worker {slowest} most"
            return _decide(late <= slots, f"{behind}, and {mode} has {slots} computed twice", slowest)
        case Sync() | RowsBehind():
            allowed = 0
        case Bounded(most):
            allowed = most
        case Adaptive(low, high):
            allowed = high if clocks[worker] < until else low
    behind = f"worker {slowest} is {stale} {'step' if stale == 1 else 'steps'} behind"
    return _decide(stale <= allowed, f"{behind}, and {mode} allows {allowed or 'none'}", slowest)


def _decide(go: bool, why: str, slowest: int) -> Decision:
    return Decision(go, why, None if go else slowest)


def behind(number: int, version: int) -> int:
    """How many updates of rows a read misses that comes behind `number` of them, from rows that have `version`: others may
    have made further ones."""
    return max(number - version, 0)


def may_read(most: int, number: int, version: int) -> Decision:
    """Whether such a read may be answered so, where it may miss `most` of them.

    >>> may_read(2, number=9, version=6)
    Decision(go=False, why='the rows are 3 updates behind, and 2 are allowed', waits_for=None)
    """
    missing = behind(number, version)
    words = f"{missing} {'update' if missing == 1 else 'updates'} behind"
    return Decision(
        missing <= most, f"the rows are {words}, and {most or 'none'} {'is' if most < 2 else 'are'} allowed"
    )


@dataclass(frozen=True)
class Pace:
    """When a worker began what it has in hand, and the seconds that it lately needed for such: waiting is not its pace."""

    began: float
    usual: float | None = None

    def after(self, now: float) -> Pace:
        """The step is done, and the next one begins."""
        last = now - self.began
        return Pace(now, last if self.usual is None else (1 - _SMOOTH) * self.usual + _SMOOTH * last)


def extra_steps(fast: Pace, slow: Pace, now: float, most: int) -> int:
    """How many steps, at most so many, the fast worker should go on before it waits for the slow one's next push.

    After DSSP (Zhao et al., ICDCS 2019): both are expected to go on at their pace, and the wait that remains is to be
    shortest. Of equal waits the one after fewer steps is taken, for less staleness.
    Where a pace is not known yet, none are.

    >>> extra_steps(Pace(10.0, usual=1.0), Pace(9.0, usual=4.5), now=10.0, most=5)  # it pushes at 13.5, 18.0, ...
    3
    """
    if fast.usual is None or slow.usual is None:
        return 0
    step, other = max(fast.usual, 1e-9), max(slow.usual, 1e-9)
    due = max(slow.began + other, now)  # overdue: any moment

    def wait(steps: int) -> float:
        late = now + steps * step - due
        return -late if late <= 0 else -late % other

    return min(range(most + 1), key=lambda steps: (round(wait(steps), 9), steps))


class Kept(msgspec.Struct):
    """What of the clocks goes to a backup, and outlives a server."""

    clocks: dict[int, int] = msgspec.field(default_factory=dict)
    staleness: dict[int, int] = msgspec.field(default_factory=dict)
    """How many pulls had how much."""


class Clocks:
    """The clocks of those who have something in hand, as a server sees them."""

    def __init__(self, mode: Mode, kept: Kept | None = None) -> None:
        """Times mean nothing to another process, so paces are not kept: they are known again after a step."""
        self.mode = mode
        self.kept = Kept() if kept is None else kept
        self._paces: dict[int, Pace] = {}
        self._until: dict[int, int] = {}

    def begin(self, worker: int, clock: int, now: float) -> Decision:
        """Whether a worker may pull for something of this clock, and take it in hand. Asked again, it is counted once."""
        clocks = self.kept.clocks
        if clocks.get(worker) == clock:
            return Decision(True, "it has it in hand")
        clocks = {**clocks, worker: clock}
        slowest = min(clocks.values())
        if isinstance(self.mode, Adaptive):
            self._grant(worker, clocks, self.mode, now)
        decision = may_pull(self.mode, clocks, worker, self._until.get(worker, 0))
        if decision.go:
            self.kept.clocks = clocks
            pace = self._paces.get(worker)
            self._paces[worker] = Pace(now, pace.usual if pace else None)
            stale = clock - slowest
            self.kept.staleness[stale] = self.kept.staleness.get(stale, 0) + 1
        return decision

    def end(self, worker: int, now: float) -> None:
        """It has done what it had in hand: nobody waits for it while it has nothing."""
        if self.kept.clocks.pop(worker, None) is not None and worker in self._paces:
            self._paces[worker] = self._paces[worker].after(now)

    def leave(self, worker: int) -> None:
        """It is dead."""
        self.kept.clocks.pop(worker, None)
        for of in (self._paces, self._until):
            of.pop(worker, None)

    def _grant(self, worker: int, clocks: Mapping[int, int], mode: Adaptive, now: float) -> None:
        """Let a worker that is too far ahead, and has used up what it was granted, go on where that shortens its wait."""
        own, slowest = clocks[worker], min(clocks.values())
        most = mode.high + 1 - (own - slowest)
        if own - slowest <= mode.low or own < self._until.get(worker, 0) or most <= 0:
            return
        unknown = Pace(now)
        behind = [self._paces.get(other, unknown) for other in clocks if clocks[other] == slowest]
        last = max(behind, key=lambda pace: float("inf") if pace.usual is None else pace.began + pace.usual)
        self._until[worker] = own + extra_steps(self._paces.get(worker, unknown), last, now, most)


def doubled(
    mode: Backup, seconds: Mapping[int, float], slots: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """The shares that each early worker computes too, after its own: of the slots that are expected last.

    `seconds` is what each worker lately needed for a share, `slots` what each carries, in its order. A share is given
    to who would have it soonest, if that is before its own worker has it. Workers need not agree: what comes twice is
    the same part, and counts once.

    >>> doubled(Backup(1), {0: 1.0, 1: 1.1, 2: 4.0}, {0: [0], 1: [1], 2: [2]})
    {0: (2,)}
    """
    due = {slot: nth * seconds[worker] for worker, own in slots.items() for nth, slot in enumerate(own, 1)}
    free = {worker: len(own) * seconds[worker] for worker, own in slots.items()}
    extra: dict[int, list[int]] = {}
    for slot in sorted(due, key=lambda slot: (due[slot], slot), reverse=True)[: mode.slots]:
        helper = min(free, key=lambda worker: (free[worker] + seconds[worker], worker))
        if free[helper] + seconds[helper] < due[slot]:
            free[helper] += seconds[helper]
            extra.setdefault(helper, []).append(slot)
    return {worker: tuple(taken) for worker, taken in extra.items()}
