"""Which servers shall hold each fragment: dealt out, mended, levelled. Pure.

A server's load is counted twice: the bytes that it leads, which is traffic, and the bytes that it holds, which is
memory. Loads are even when the largest is at most a tenth above the smallest. Levelling moves one fragment at a time
from a more to a less loaded server, and only where that brings the two closer: so it comes to an end, after few moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

SLACK = 0.10


@dataclass(frozen=True)
class Server:
    number: int
    machine: int
    leaving: bool = False
    """It is to go: it may hold what it holds until that is elsewhere, and gets nothing new."""


class Goals:
    """A goal for every fragment, the primary first, and the loads that follow from them."""

    def __init__(self, nbytes: Sequence[int], servers: Iterable[Server], replicas: int) -> None:
        self.machine = {server.number: server.machine for server in servers if not server.leaving}
        """The servers that may be aimed at."""
        if not self.machine:
            raise ValueError("there is no server to hold the parameters")
        self.goals: list[tuple[int, ...]] = [()] * len(nbytes)
        self.why: dict[int, str] = {}
        """For the goals that were changed."""
        self._nbytes = nbytes
        self._copies = min(replicas, len(self.machine))
        self._led = dict.fromkeys(self.machine, 0)
        self._held = dict.fromkeys(self.machine, 0)
        self._at: dict[int, set[int]] = {server: set() for server in self.machine}
        """The fragments that each server holds."""
        self._pairs: Counter[tuple[int, int]] = Counter()
        """Bytes by (primary, backup): what the one would leave to the other."""

    def aim(self, fragment: int, goal: Sequence[int], why: str | None = None) -> None:
        for sign, servers in ((-1, self.goals[fragment]), (1, goal)):
            size = sign * self._nbytes[fragment]
            for server in servers:
                self._held[server] += size
                self._pairs[servers[0], server] += size
            for primary in servers[:1]:
                self._led[primary] += size
        for server in self.goals[fragment]:
            self._at[server].remove(fragment)
        for server in goal:
            self._at[server].add(fragment)
        self.goals[fragment] = tuple(goal)
        if why:
            self.why[fragment] = why

    def deal(self) -> None:
        """The first time: the largest fragments first, each to the server that leads least."""
        largest_first = sorted(range(len(self._nbytes)), key=lambda fragment: -self._nbytes[fragment])
        for fragment in largest_first:
            self.aim(fragment, [min(self.machine, key=lambda server: (self._led[server], server))])
        for fragment in largest_first:
            self.mend(fragment)

    def mend(
        self, fragment: int, holders: Collection[int] = (), whole: Collection[int] = (), why: str | None = None
    ) -> None:
        """Aim at as many servers as there shall be copies."""
        while len(goal := self.goals[fragment]) < self._copies:
            self.aim(fragment, (*goal, self._another(goal, holders, whole)), why)

    def _another(self, goal: Sequence[int], holders: Collection[int], whole: Collection[int]) -> int:
        """One more server for a goal: on another machine if there is one; one that has a copy already, better a whole
        one; and then so that a server that dies would leave as much to each of the others."""

        def order(server: int) -> tuple[int, ...]:
            crowded = self._machines((*goal, server)) == self._machines(goal)
            left_to_it = self._pairs[goal[0], server] if goal else 0
            return crowded, server not in whole, server not in holders, left_to_it, self._held[server], server

        return min(self.machine.keys() - {*goal}, key=order)

    def spread(self) -> None:
        """Copies that could be on more machines than they are move there."""
        most = min(self._copies, len({*self.machine.values()}))
        for fragment in range(len(self.goals)):
            while self._machines(goal := self.goals[fragment]) < most:
                wider = self._without_one((*goal, self._another(goal, (), ())), kept=goal[0])
                self.aim(fragment, wider, "its copies were on fewer machines than they could be")

    def level(self) -> None:
        """First who leads, then who holds; the second leaves the first as it is."""
        while self._level_led():
            pass
        while self._level_held():
            pass

    def _level_led(self) -> bool:
        low, high = (pick(self._led, key=lambda server: (self._led[server], server)) for pick in (min, max))
        if _even(self._led[low], self._led[high]):
            return False
        led = [fragment for fragment in self._at[high] if self.goals[fragment][0] == high]
        there = [fragment for fragment in led if low in self.goals[fragment]]
        gap = self._led[high] - self._led[low]
        fragment = self._fitting(there, gap)  # nothing has to be copied for it
        fragment = self._fitting(led, gap) if fragment is None else fragment
        if fragment is None:
            return False
        goal = self.goals[fragment]
        others = [server for server in goal if server != low]
        goal = (low, *others) if low in goal else self._without_one((low, *goal), kept=low)
        self.aim(fragment, goal, f"server {high} led more than server {low}")
        return True

    def _level_held(self) -> bool:
        by_load = sorted(self._held, key=lambda server: (self._held[server], server))
        for high in reversed(by_load):
            for low in by_load:
                if _even(self._held[low], self._held[high]):
                    break
                movable = [fragment for fragment in self._at[high] if self._may_move(fragment, high, low)]
                fragment = self._fitting(movable, self._held[high] - self._held[low])
                if fragment is not None:
                    goal = _swapped(self.goals[fragment], high, low)
                    self.aim(fragment, goal, f"server {high} held more than server {low}")
                    return True
        return False

    def _may_move(self, fragment: int, high: int, low: int) -> bool:
        """Whether a backup may move from the one server to the other, and leave its copies on as many machines."""
        goal = self.goals[fragment]
        if high == goal[0] or low in goal:
            return False
        return self._machines(_swapped(goal, high, low)) >= self._machines(goal)

    def _fitting(self, fragments: Iterable[int], gap: int) -> int | None:
        """The one whose move narrows a gap between two loads most, if any does."""
        fitting = [fragment for fragment in fragments if 0 < self._nbytes[fragment] < gap]
        return min(fitting, key=lambda fragment: (abs(gap - 2 * self._nbytes[fragment]), fragment), default=None)

    def _without_one(self, goal: Sequence[int], kept: int) -> tuple[int, ...]:
        """A goal less the server that can be missed best: its machine has another one, and it holds most."""

        def order(server: int) -> tuple[int, ...]:
            rest = [other for other in goal if other != server]
            return self._machines(rest), self._held[server], server

        missed = max((server for server in goal if server != kept), key=order)
        return tuple(server for server in goal if server != missed)

    def _machines(self, servers: Iterable[int]) -> int:
        return len({self.machine[server] for server in servers})


def _even(low: int, high: int) -> bool:
    return high <= (1 + SLACK) * low


def _swapped(goal: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(new if server == old else server for server in goal)
