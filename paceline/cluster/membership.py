"""Who is in the run: events in, instructions with their reasons out. Pure: no clock, no sockets.

A view is a term's workers in order. It changes in two ways:

    a death    is answered at once by the next view, of those who remain. Whoever waits for the dead
               one in an older term goes on in it.
    a change   that nobody needs to wait for, a join or a leave, is announced, and entered by all at a
               step's end they agree on among themselves. Until the newcomer says that it has the run's
               state, or the leaver has gone, the change is pending: any death meanwhile is answered by
               a view of the settled one's members, and a newcomer starts over.

So at any moment those who train are either all in the settled view or all in the pending one, and the
view that follows a death is the same for both.

Spares are newcomers that are ready while nobody is missing: they wait until somebody is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from paceline.wires.view import View


@dataclass(frozen=True)
class Publish:
    """Make this view known: to those who lost a member, or (agreed) as the one to enter next."""

    view: View
    agreed: bool
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
    LEAVING = "leaving"
    """A member that has been asked to go."""
    STARTING = "starting"
    READY = "ready"
    FINISHED = "finished"
    """It has come to the script's end, and has ended."""
    GONE = "gone"


_COMING = (Standing.STARTING, Standing.READY)


@dataclass
class Membership:
    """The state of one run's membership; plain values, so that the next leader can go on with it."""

    wanted: int
    """How many should train."""
    starts_left: int
    """How many more workers may be started."""
    spares: int
    """How many more should wait, ready to join."""
    settled: View
    standing: dict[int, Standing] = field(default_factory=dict)
    pending: View | None = None
    room: int = 1 << 30
    """How many the machines that are there have places for."""
    overtaken: list[int] = field(default_factory=list)
    """Leavers whose change a death has overtaken: they may have gone by it all the same."""

    @staticmethod
    def begin(wanted: int, starts_left: int, spares: int = 0) -> Membership:
        """All are started together, the spares too."""
        first = View(1, tuple(range(wanted)))
        standing = dict.fromkeys(first.members, Standing.MEMBER)
        standing |= dict.fromkeys(range(wanted, wanted + spares), Standing.STARTING)
        return Membership(wanted, starts_left, spares, first, standing)

    @property
    def newest(self) -> int:
        return self.pending.term if self.pending else self.settled.term

    @property
    def reach(self) -> int:
        """How many there will be once everybody has come who may still come."""
        return min(self.wanted, self._there + self._may_start)

    @property
    def reach_with_room(self) -> int:
        """The same, should a machine come that has places for them."""
        return min(self.wanted, self._there + self.starts_left)

    @property
    def _there(self) -> int:
        return sum(1 for standing in self.standing.values() if standing in (Standing.MEMBER, *_COMING))

    @property
    def _may_start(self) -> int:
        here = sum(1 for standing in self.standing.values() if standing is not Standing.GONE)
        return max(0, min(self.starts_left, self.room - here))

    # what happens

    def died(self, worker: int, why: str) -> list[Instruction]:
        """A worker is dead and reaped."""
        before = self.standing[worker]
        if before is Standing.GONE:
            return []
        self.standing[worker] = Standing.GONE
        if before is Standing.STARTING or (before is Standing.READY and not self._is_pending(worker)):
            return self._replace(f"worker {worker} {why} before it had joined")
        remaining = self._remaining
        if not remaining:
            done = Standing.FINISHED in self.standing.values()
            return [] if done else [GiveUp(f"worker {worker} {why}, and no worker is left")]
        if self.pending is not None:
            self.overtaken += [m for m in remaining if m not in self.pending.members]
        out: list[Instruction] = []
        for newcomer in self._pending_newcomers():
            if newcomer != worker:
                # It may have been told to enter a view that will never be: a fresh one is simpler than a second try.
                self.standing[newcomer] = Standing.GONE
                out.append(Kill(newcomer, f"its join was overtaken by the death of worker {worker}"))
        self.settled, self.pending = View(self.newest + 1, remaining), None
        if self.all_leave:  # whoever was to stay is gone: some of them stay after all, for somebody must
            self.standing |= dict.fromkeys(remaining[: self.wanted], Standing.MEMBER)
        out.append(Publish(self.settled, False, f"worker {worker} {why}"))
        return out + self._replace(f"worker {worker} {why}")

    def left(self, worker: int) -> list[Instruction]:
        """A worker has gone at a step's end, as all had agreed."""
        if self.standing[worker] is Standing.GONE:
            return []
        if self.pending is None or worker in self.pending.members or worker in self.overtaken:
            return self.died(worker, "left")  # a death overtook the change: the others wait for it once more
        self.standing[worker] = Standing.GONE
        if all(self.standing[m] is Standing.GONE for m in self.settled.members if m not in self.pending.members):
            self.settled, self.pending = self.pending, None
        return self._replace(f"worker {worker} left")

    @property
    def _remaining(self) -> tuple[int, ...]:
        return tuple(m for m in self.settled.members if self.standing[m] not in (Standing.GONE, Standing.FINISHED))

    def finished(self, worker: int, term: int) -> list[Instruction]:
        """A member has come to the end in this term. If a death has been answered by a newer view with it, others may
        wait for it in there."""
        if self.standing[worker] not in (Standing.MEMBER, Standing.LEAVING):
            return []
        self.standing[worker] = Standing.FINISHED
        if term >= self.settled.term or worker not in self.settled.members or not self._remaining:
            return []
        self.settled, self.pending = View(self.newest + 1, self._remaining), None
        return [Publish(self.settled, False, f"worker {worker} had finished before that")]

    def ready(self, worker: int) -> list[Instruction]:
        """A newcomer has run its script as far as the loop."""
        if self.standing.get(worker) is not Standing.STARTING:
            return []
        self.standing[worker] = Standing.READY
        return self._announce()

    def needs(self, worker: int) -> bool:
        """Whether this newcomer is to come in as soon as it can; it may be a spare, or there are enough now."""
        coming = [w for w, standing in self.standing.items() if standing in _COMING and not self._is_pending(w)]
        return worker in coming[: max(0, self.wanted - len(self._staying))]

    def healed(self, worker: int) -> list[Instruction]:
        """The pending view is in force: its newcomer has the run's state."""
        if self.pending is None or worker not in self.pending.members or self.standing[worker] is not Standing.READY:
            return []
        self.settled, self.pending = self.pending, None
        self.standing[worker] = Standing.MEMBER
        return self._announce()

    # what is wished for

    def leave(self, worker: int) -> list[Instruction]:
        """This worker should go: at a step's end if it trains, at once if it does not yet."""
        match self.standing.get(worker):
            case Standing.MEMBER:
                self.standing[worker] = Standing.LEAVING
                return self._announce()
            case Standing.STARTING | Standing.READY:
                return [Kill(worker, "it is not needed any more")]
            case _:
                return []

    def scale(self, wanted: int) -> list[Instruction]:
        """So many should train from now on. Who came last goes first; main stays."""
        self.wanted = wanted
        staying = self._staying
        coming = [w for w, standing in self.standing.items() if standing in _COMING and w not in staying]
        needed = max(0, wanted - len(staying)) + self.spares
        out: list[Instruction] = []
        for worker in reversed([*staying[wanted:], *coming[needed:]]):
            out += self.leave(worker)
        return out + self._replace(f"{wanted} workers were asked for")

    def make_room(self, room: int, why: str) -> list[Instruction]:
        """A machine has come or gone: so many workers have a place now."""
        self.room = room
        return self._replace(why)

    @property
    def all_leave(self) -> bool:
        """Everybody was asked to go: the run must stop instead."""
        return all(self.standing[m] is Standing.LEAVING for m in self.settled.members)

    # all over again

    def end(self) -> None:
        """Everybody is to end: nothing that happens to them matters any more."""
        self.standing = dict.fromkeys(self.standing, Standing.GONE)
        self.settled = View(self.newest, self.settled.members)  # no term is used twice
        self.pending, self.overtaken = None, []

    @property
    def beginners(self) -> tuple[int, int]:
        """How many would begin again, and how many spares: as many as should, and have a place."""
        count = max(1, min(self.wanted, self.room))
        return count, max(0, min(self.spares, self.room - count))

    def begin_again(self, why: str) -> list[Instruction]:
        """All have ended: the beginners begin together, in a term of their own, and the spares with them."""
        first, (count, spare) = max(self.standing) + 1, self.beginners
        members = tuple(range(first, first + count))
        spares = range(first + count, first + count + spare)
        self.settled = View(self.settled.term + 1, members)
        self.standing |= dict.fromkeys(members, Standing.MEMBER) | dict.fromkeys(spares, Standing.STARTING)
        self.starts_left -= len(members) + len(spares)
        return [Publish(self.settled, False, why), *(Start(number, why) for number in (*members, *spares))]

    # what follows

    def _announce(self) -> list[Instruction]:
        """One change at a time: first who leaves, then one newcomer after the other."""
        if self.pending is not None:
            return []
        leaving = [m for m in self.settled.members if self.standing[m] is Standing.LEAVING]
        if leaving and len(leaving) < len(self.settled.members):
            rest = tuple(m for m in self.settled.members if m not in leaving)
            self.pending = View(self.newest + 1, rest)
            who = ", ".join(map(str, leaving))
            return [Publish(self.pending, True, f"worker {who} leaves")]
        waiting = [worker for worker, standing in self.standing.items() if standing is Standing.READY]
        if not waiting or len(self.settled.members) >= self.wanted:
            return []
        self.pending = View(self.newest + 1, (*self.settled.members, waiting[0]))
        return [Publish(self.pending, True, f"worker {waiting[0]} is ready to join")]

    def _replace(self, why: str) -> list[Instruction]:
        out: list[Instruction] = []
        staying = sum(1 for m in self.settled.members if self.standing[m] in (Standing.MEMBER, Standing.FINISHED))
        coming = sum(1 for standing in self.standing.values() if standing in _COMING)
        while staying + coming < self.wanted + self.spares and self._may_start:
            number = max(self.standing) + 1
            self.standing[number] = Standing.STARTING
            self.starts_left -= 1
            coming += 1
            out.append(Start(number, why))
        return out + self._announce()

    @property
    def _staying(self) -> list[int]:
        """Who trains and will go on, or is about to begin."""
        return [m for m in self.settled.members if self.standing[m] is Standing.MEMBER] + self._pending_newcomers()

    def _pending_newcomers(self) -> list[int]:
        return [member for member in self.pending.members if member not in self.settled.members] if self.pending else []

    def _is_pending(self, worker: int) -> bool:
        return worker in self._pending_newcomers()
