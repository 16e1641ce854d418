"""Which server holds which fragment. Pure: servers and what was before in, a placement with its reasons out.

Every fragment has a primary, which answers and applies, and backups, which are told everything before it is
acknowledged. A backup is *filled* once it holds all that the primary holds; only then can it take over. Each fragment
also has a goal, the servers that shall hold it with the primary first; where it differs from what is, copies are added
and filled, then the primary changes, then what is left over is dropped. So nothing ever moves but by way of a filled
copy, and any death in between finds a fragment with all the copies it had.

    place()     answers a death or a first call: what is lost is made good, nothing else moves
    balance()   takes the next step towards even loads; called again after every fill, until nothing changes

Server numbers are never used twice: one that comes back is a newcomer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.servers.goals import Goals, Server


class Act(enum.Enum):
    FILL = "fill"
    """The server gets a copy, empty so far: the primary fills it."""
    PROMOTE = "promote"
    """The server, which has a filled copy, is the primary now."""
    DROP = "drop"
    """The server's copy goes."""
    LOSE = "lose"
    """No copy is left; the server shall hold what is brought back."""


@dataclass(frozen=True)
class Change:
    fragment: int
    act: Act
    server: int
    why: str


@dataclass(frozen=True)
class Copies:
    """Where one fragment is, and where it shall be."""

    primary: int
    backups: tuple[int, ...]
    filled: frozenset[int]
    """The backups that could take over."""
    goal: tuple[int, ...]
    """Who shall hold it; the first one as its primary."""

    @staticmethod
    def at(goal: Sequence[int], filled: Iterable[int] = ()) -> Copies:
        """Where it shall be, already."""
        return Copies(goal[0], tuple(goal[1:]), frozenset(filled), tuple(goal))

    @property
    def holders(self) -> tuple[int, ...]:
        return (self.primary, *self.backups)

    @property
    def whole(self) -> frozenset[int]:
        """Who holds all of it."""
        return self.filled | {self.primary}


@dataclass(frozen=True)
class Placement:
    """One answer for all fragments, by their numbers."""

    copies: tuple[Copies, ...]
    lost: tuple[int, ...] = ()
    """Fragments of which no filled copy is left: their primaries have nothing, until `restored`."""
    changes: tuple[Change, ...] = field(default=(), compare=False)
    """How it differs from the placement before."""

    def fill(self, fragment: int, server: int) -> Placement:
        """The server holds all that the fragment's primary holds. Its word must be of this placement: one that crossed a
        promotion tells of a copy of what the former primary had. It may also be one that shall not hold it any more."""
        copies = self.copies[fragment]
        if server not in copies.backups or fragment in self.lost:
            return self
        filled = replace(copies, filled=copies.filled | {server})
        return Placement((*self.copies[:fragment], filled, *self.copies[fragment + 1 :]), self.lost)

    def restored(self) -> Placement:
        """All fragments were rolled back together: every primary has its data again."""
        return Placement(self.copies)

    @property
    def settled(self) -> bool:
        """Everything is where it shall be, and filled."""
        return not self.lost and all(c.holders == c.goal and c.whole == {*c.goal} for c in self.copies)

    def holds(self, server: int) -> bool:
        """Whether it holds anything. One that is leaving may go once it does not."""
        return any(server in copies.holders for copies in self.copies)


def place(
    nbytes: Sequence[int], servers: Sequence[Server], replicas: int = 2, before: Placement | None = None
) -> Placement:
    """Where fragments of these sizes are now that these servers are there.

    The copies of a first placement all count as filled: they begin with nothing, and what comes goes to all of them.

    >>> servers = [Server(number, machine=0) for number in range(3)]
    >>> first = place([100, 100, 100], servers)
    >>> [(copies.primary, copies.backups) for copies in first.copies]
    [(0, (1,)), (1, (2,)), (2, (0,))]
    >>> after = place([100, 100, 100], servers[1:], before=first)
    >>> for change in after.changes:
    ...     print(change.fragment, change.act.value, change.server, change.why)
    0 promote 1 server 0 is gone, and server 1 has a filled copy
    0 fill 2 server 0 is gone
    2 fill 1 server 0 is gone
    """
    goals = Goals(nbytes, servers, replicas)
    if before is None:
        goals.deal()
        goals.level()
        return Placement(tuple(Copies.at(goal, goal[1:]) for goal in goals.goals))
    survivors = _bury(nbytes, servers, before)
    for fragment, copies in enumerate(survivors.copies):
        goal = [server for server in copies.goal if server in goals.machine]
        if copies.primary in goal and copies.goal[0] not in goal:
            goal.sort(key=lambda server: server != copies.primary)
        goals.aim(fragment, goal)
    for fragment, copies in enumerate(survivors.copies):
        goals.mend(fragment, copies.holders, copies.whole, _shortfall(copies, goals))
    return _advance(survivors, goals)


def balance(nbytes: Sequence[int], servers: Sequence[Server], replicas: int, before: Placement) -> Placement:
    """The next step towards even loads, and copies on different machines; the same placement once there is none.

    As few bytes move as that needs: loads may differ by a tenth. Only after `place` with the same servers.

    >>> both = [Server(0, machine=0), Server(1, machine=0)]
    >>> now = place([100, 100], both[:1], replicas=1)
    >>> now = balance([100, 100], both, 1, now)
    >>> now.changes
    (Change(fragment=0, act=<Act.FILL: 'fill'>, server=1, why='server 0 led more than server 1'),)
    >>> now = balance([100, 100], both, 1, now.fill(0, 1))
    >>> [(change.act.value, change.server, change.why) for change in now.changes]
    [('promote', 1, 'its copy is filled'), ('drop', 0, 'the copies it shall have are filled')]
    """
    goals = Goals(nbytes, servers, replicas)
    for fragment, copies in enumerate(before.copies):
        goals.aim(fragment, copies.goal)
    goals.spread()
    goals.level()
    return _advance(replace(before, changes=()), goals)


def _bury(nbytes: Sequence[int], servers: Sequence[Server], before: Placement) -> Placement:
    """What is left of a placement. A dead primary's fragments go to those of their filled copies that lead least."""
    alive = frozenset(server.number for server in servers)
    led = dict.fromkeys(alive, 0)
    for size, copies in zip(nbytes, before.copies, strict=True):
        led[copies.primary] = led.get(copies.primary, 0) + size
    rest: list[Copies] = []
    lost, changes = set(before.lost), []
    for fragment, copies in enumerate(before.copies):
        gone, filled = copies.primary, copies.filled & alive
        primary = gone
        if gone not in alive:
            staying = frozenset(server.number for server in servers if not server.leaving)
            primary = min(filled or staying, key=lambda server: (led[server], server))
            led[primary] += nbytes[fragment]
            if filled:
                act, why = Act.PROMOTE, f"server {gone} is gone, and server {primary} has a filled copy"
            else:
                act, why = Act.LOSE, f"server {gone} is gone, and no other had a filled copy"
                lost.add(fragment)
            changes.append(Change(fragment, act, primary, why))
        backups = tuple(server for server in copies.backups if server in alive and server != primary)
        rest.append(Copies(primary, backups, filled - {primary}, copies.goal))
    return Placement(tuple(rest), tuple(sorted(lost)), tuple(changes))


def _advance(now: Placement, goals: Goals) -> Placement:
    """What can be done at once towards the goals, after the changes that were made already."""
    changes = list(now.changes)
    then: list[Copies] = []
    for fragment, copies in enumerate(now.copies):
        goal, why = goals.goals[fragment], goals.why.get(fragment)
        primary, backups, filled = copies.primary, list(copies.backups), copies.filled
        if goal[0] in filled:
            filled = filled - {goal[0]} | {primary}
            backups = [primary if server == goal[0] else server for server in backups]
            primary = goal[0]
            changes.append(Change(fragment, Act.PROMOTE, primary, why or "its copy is filled"))
        for server in goal:
            if server != primary and server not in backups:
                backups.append(server)
                changes.append(Change(fragment, Act.FILL, server, why or "it shall hold a copy"))
        done = primary == goal[0] and filled >= {*goal[1:]}
        for server in [server for server in backups if server not in goal and (done or server not in filled)]:
            backups.remove(server)
            filled -= {server}
            reason = "the copies it shall have are filled" if done else "it shall not hold a copy any more"
            changes.append(Change(fragment, Act.DROP, server, reason))
        if done:
            backups = list(goal[1:])
        then.append(Copies(primary, tuple(backups), filled, goal))
    return Placement(tuple(then), now.lost, tuple(changes))


def _shortfall(copies: Copies, goals: Goals) -> str:
    """Why a goal of before does not do any more."""
    absent = [server for server in copies.goal if server not in goals.machine]
    if not absent:
        return "it has too few copies"
    leaving = [server for server in absent if server in copies.holders]
    names = " and ".join(str(server) for server in leaving or absent)
    subject = f"server {names} is" if len(leaving or absent) == 1 else f"servers {names} are"
    return f"{subject} {'to leave' if leaving else 'gone'}"
