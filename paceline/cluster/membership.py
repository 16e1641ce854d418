"""Who is in the run: events in, instructions with their reasons out. Pure: no clock, no sockets.

A view is a term's workers in order. It grows by one kind of change and shrinks by another:

    a death    is answered at once by the next view, of those who remain. Whoever waits for the dead
               one in an older term goes on in it.
    a join     is announced, and entered by all at a step's end they agree on among themselves. Until
               the newcomer says that it has the run's state, the join is pending: any death meanwhile
               is answered by a view without the newcomer, which starts over.

So at any moment those who train are either all in the settled view or all in the pending one, and the
view that follows a death is the same for both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True)
class View:
    term: int
    members: tuple[int, ...]
    """Workers by number, in the order of their ranks; the first one is main."""


@dataclass(frozen=True)
class Publish:
    """Make this view known: to those who lost a member, or (joins) as the one to enter next."""

    view: View
    joins: bool
    why: str


@dataclass(frozen=True)
class Start:
    """Start a worker of this number, to join."""

    worker: int
    why: str


@dataclass(frozen=True)
class Kill:
    """End this worker: it is of no use any more."""

    worker: int
    why: str


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on."""

    why: str


Instruction = Publish | Start | Kill | GiveUp


class Standing(enum.Enum):
    MEMBER = "member"
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


@dataclass
class Membership:
    """The state of one run's membership. `spare_starts`: how many replacements may be started in all."""

    wanted: int
    spare_starts: int
    settled: View = field(init=False)
    pending: View | None = None
    standing: dict[int, Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settled = View(1, tuple(range(self.wanted)))
        self.standing = dict.fromkeys(self.settled.members, Standing.MEMBER)

    @property
    def newest(self) -> int:
        return self.pending.term if self.pending else self.settled.term

    def died(self, worker: int, why: str) -> list[Instruction]:
        """A worker is dead and reaped."""
        before = self.standing[worker]
        if before is Standing.GONE:
            return []
        self.standing[worker] = Standing.GONE
        if before is Standing.STARTING or (before is Standing.READY and not self._is_pending(worker)):
            return self._replace(f"worker {worker} {why} before it had joined")
        remaining = tuple(member for member in self.settled.members if member != worker)
        if not remaining:
            return [GiveUp(f"worker {worker} {why}, and no worker is left")]
        out: list[Instruction] = []
        for newcomer in self._pending_newcomers():
            if newcomer != worker:
                # It may have been told to enter a view that will never be: a fresh one is simpler than a second try.
                self.standing[newcomer] = Standing.GONE
                out.append(Kill(newcomer, f"its join was overtaken by the death of worker {worker}"))
        self.settled, self.pending = View(self.newest + 1, remaining), None
        out.append(Publish(self.settled, False, f"worker {worker} {why}"))
        return out + self._replace(f"worker {worker} {why}")

    def ready(self, worker: int) -> list[Instruction]:
        """A newcomer has run its script as far as the loop."""
        if self.standing.get(worker) is not Standing.STARTING:
            return []
        self.standing[worker] = Standing.READY
        return self._announce()

    def healed(self, worker: int) -> list[Instruction]:
        """The pending view is in force: its newcomer has the run's state."""
        if self.pending is None or worker not in self.pending.members or self.standing[worker] is not Standing.READY:
            return []
        self.settled, self.pending = self.pending, None
        self.standing[worker] = Standing.MEMBER
        return self._announce()

    def _announce(self) -> list[Instruction]:
        """One newcomer at a time."""
        waiting = [worker for worker, standing in self.standing.items() if standing is Standing.READY]
        if self.pending is not None or not waiting:
            return []
        self.pending = View(self.newest + 1, (*self.settled.members, waiting[0]))
        return [Publish(self.pending, True, f"worker {waiting[0]} is ready to join")]

    def _replace(self, why: str) -> list[Instruction]:
        out: list[Instruction] = []
        coming = sum(1 for standing in self.standing.values() if standing in (Standing.STARTING, Standing.READY))
        while len(self.settled.members) + coming < self.wanted and self.spare_starts > 0:
            number = max(self.standing) + 1
            self.standing[number] = Standing.STARTING
            self.spare_starts -= 1
            coming += 1
            out.append(Start(number, why))
        return out + self._announce()

    def _pending_newcomers(self) -> list[int]:
        return [member for member in self.pending.members if member not in self.settled.members] if self.pending else []

    def _is_pending(self, worker: int) -> bool:
        return worker in self._pending_newcomers()
