"""The run's servers and what each of them holds: events in, the next layout out. Pure; no torch in here.

A layout is a placement with a number, which grows with every change. Whoever sends something to a server says by
which layout; a server that knows a newer one refuses it. Server numbers are never used twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from paceline.servers.goals import Server
from paceline.servers.placement import Copies, Placement, balance, place


class Address(msgspec.Struct, frozen=True):
    """Where a server is reached: by shared memory on its own machine, over the network from others."""

    near: str
    far: str = ""
    machine: int = 0

    def seen_from(self, machine: int) -> str:
        return self.near if machine == self.machine else self.far


class Fleet(msgspec.Struct):
    wanted: int = 0
    """How many servers there should be."""
    replicas: int = 1
    """Copies of each fragment, as far as there are servers."""
    starts_left: int = 0
    number: int = 0
    """Of the layout; 0: there is none yet."""
    addresses: dict[int, Address] = {}
    """Of each server that is there."""
    nbytes: list[int] = []
    """The size of each fragment, once a worker has told."""
    rooms: dict[str, tuple[int, int]] = {}
    """What the fragments are of: the first one's number, and how many. A room's fragments follow those of the rooms before."""
    placement: Placement | None = None
    since: list[dict[int, int]] = []
    """For each fragment, the layout by which each of its holders came to hold it."""
    gone: list[int] = []
    """Servers that have ended, or are about to: what they said before may still be on its way."""
    leaving: list[int] = []
    """Servers that go once others hold what they hold."""

    def came(self, server: int, address: Address) -> None:
        """A server is ready."""
        if server in self.gone or self.addresses.get(server) == address:
            return
        self.addresses[server] = address
        self._go_on()

    def sized(self, nbytes: list[int], room: str = "parameters") -> None:
        """What is to be held in a room. Told again by other workers; it is the same."""
        if room not in self.rooms:
            self.rooms[room] = len(self.nbytes), len(nbytes)
            self.nbytes = [*self.nbytes, *nbytes]
            self._go_on()

    def died(self, server: int) -> bool:
        """A server is gone; whether all that it held is still there."""
        self.gone.append(server)
        self.leaving = [each for each in self.leaving if each != server]
        if self.addresses.pop(server, None) is None or self.placement is None:
            return True
        if not self.addresses:
            return False
        if set(self.addresses) <= {*self.leaving}:  # some of them stay after all, for somebody must
            self.leaving = self.leaving[self.wanted :]
        self._become(place(self.nbytes, self._servers, self.replicas, self.placement))
        return not self.placement.lost

    def filled(self, server: int, since: dict[int, int]) -> None:
        """A server holds all of these fragments now, unless it has lost them again while that was said."""
        assert self.placement is not None
        placement = self.placement
        for fragment, number in since.items():
            if self.since[fragment].get(server) == number:
                placement = placement.fill(fragment, server)
        self._become(balance(self.nbytes, self._servers, self.replicas, placement))

    def scale(self, wanted: int, started: Sequence[int]) -> None:
        """So many from now on. Of those that were started and have not ended, who came last goes first."""
        staying = self._staying(started)
        self.wanted = wanted
        self.leaving += sorted(staying, key=lambda server: (server not in self.addresses, server))[wanted:]
        self._go_on()

    def spread(self, homes: Mapping[int, int], here: Collection[int]) -> None:
        """Whoever is on a machine that goes is to go, and so is one of a machine that has two more than another: others
        come in their place, where there are fewest. `homes`: the machine of each that was started and has not ended."""
        there = Counter(dict.fromkeys(here, 0))
        for server in self._staying(list(homes)):
            if homes[server] in there:
                there[homes[server]] += 1
            else:
                self.leaving.append(server)
        while there and max(there.values()) - min(there.values()) > 1:
            crowded, empty = (pick(sorted(there), key=there.__getitem__) for pick in (max, min))
            self.leaving.append(max(server for server in self._staying(list(homes)) if homes[server] == crowded))
            there[crowded] -= 1
            there[empty] += 1
        self._go_on()

    def short(self, started: Sequence[int]) -> int:
        """How many more are to be started."""
        return max(0, self.wanted - len(self._staying(started)))

    def dismiss(self) -> list[int]:
        """Those that were to go and hold nothing any more: they may end now."""
        held = self.placement.holds if self.placement is not None else lambda server: False
        idle = [server for server in self.leaving if not held(server)]
        self.leaving = [server for server in self.leaving if server not in idle]
        self.gone += idle
        for server in idle:
            self.addresses.pop(server, None)
        return idle

    @property
    def settled(self) -> bool:
        """All servers are there, and everything is where it shall be."""
        there = len(self.addresses) == self.wanted
        return there and self.placement is not None and self.placement.settled

    def described(self) -> dict[str, Any]:
        """The layout in numbers: the bytes of parameters that each server holds, those for which it is the primary, and the
        fewest whole copies of a fragment."""
        assert self.placement is not None
        held, led = dict.fromkeys(sorted(self.addresses), 0), dict.fromkeys(sorted(self.addresses), 0)
        keys = range(*self._room("keys"))
        for fragment, (nbytes, copies) in enumerate(zip(self.nbytes, self.placement.copies, strict=True)):
            if fragment in keys:
                continue  # they count for the placement, but have no size that is known here
            led[copies.primary] += nbytes
            for server in copies.holders:
                held[server] += nbytes
        fewest = min((len(copies.whole) for copies in self.placement.copies), default=0)
        return {"layout": self.number, "bytes": held, "leads": led, "copies": fewest}

    def _room(self, name: str) -> tuple[int, int]:
        """From which fragment to which."""
        first, count = self.rooms.get(name, (0, 0))
        return first, first + count

    def _go_on(self) -> None:
        if not self.nbytes:
            return
        if self.placement is not None:
            mended = place(self.nbytes, self._servers, self.replicas, self._with_new_rooms(self.placement))
            self._become(balance(self.nbytes, self._servers, self.replicas, mended))
        elif len(self._staying(list(self.addresses))) >= self.wanted:
            self._become(place(self.nbytes, self._servers, self.replicas))

    def _with_new_rooms(self, placement: Placement) -> Placement:
        """The copies of what is to be held from now on begin with nothing, as those of a first placement."""
        fresh = place(self.nbytes[len(placement.copies) :], self._servers, self.replicas)
        return Placement((*placement.copies, *fresh.copies), placement.lost)

    def _become(self, placement: Placement) -> None:
        if placement == self.placement:
            return
        self.number += 1
        known = self.placement.copies if self.placement is not None else ()
        fresh = len(self.nbytes) - len(known)
        before: list[Copies | None] = [*known, *[None] * fresh]
        since: list[dict[int, int]] = [*self.since, *({} for _ in range(fresh))]
        self.since = [self._since(*each) for each in zip(before, placement.copies, since, strict=True)]
        self.placement = placement

    def _since(self, before: Copies | None, copies: Copies, known: dict[int, int]) -> dict[int, int]:
        """What one primary has begun to fill is not the next one's doing: that one tells it nothing, and begins anew."""
        another = before is not None and before.primary != copies.primary
        return {
            server: self.number if another and server not in copies.whole else known.get(server, self.number)
            for server in copies.holders
        }

    @property
    def _servers(self) -> list[Server]:
        """Who is to go holds what it holds until all are there who come in its place: till then there would be fewer copies."""
        complete = len(self._staying(list(self.addresses))) >= self.wanted
        going = {*self.leaving} if complete else set()
        return [Server(k, self.addresses[k].machine, leaving=k in going) for k in sorted(self.addresses)]

    def _staying(self, servers: Sequence[int]) -> list[int]:
        return [server for server in servers if server not in self.leaving and server not in self.gone]
