"""What a leader has decided and knows: written to the store before anybody is told, so that the next
leader goes on where it stopped. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.cluster.blame import Raised
from paceline.cluster.fleet import Fleet
from paceline.cluster.membership import Instruction, Kill, Membership, Publish, Standing, Start
from paceline.wires.board import Phase, Stop
from paceline.wires.view import View


class Failure(msgspec.Struct):
    """Why the run ends before its time."""

    who: str
    text: str
    trace: str
    exit_code: int
    worker: int


class End(msgspec.Struct, frozen=True):
    """How a worker has ended."""

    code: int
    """Negative: a signal, as of subprocess."""
    phase: Phase
    """The last that it wrote on the board."""
    term: int = 0
    """In which it has finished, if it has."""


class Machine(msgspec.Struct):
    """One machine of the run, by its agent."""

    name: str
    identity: str
    """Its agents', whichever of them speaks for it."""
    places: int = 1 << 30
    """How many workers it may have."""
    here: bool = True
    """Heard of lately, and not about to go."""


class Rolled(msgspec.Struct):
    """How often the run went back to a checkpoint by itself."""

    why: str = ""
    """Set while the processes of before are ending."""
    times: int = 0
    in_vain: int = 0
    """How often in a row before a step was trained."""
    reached: int | None = None
    """The step it had come to before the last one, until it is known where that led to."""
    redone: int = 0
    """Steps that were trained again, all in all."""


class Journal(msgspec.Struct):
    membership: Membership
    started: float
    """By the wall clock, which machines share more or less."""
    views: dict[int, View]
    after: dict[int, int] = {}
    """For each term, that of the view that followed the first death in it."""
    facts: dict[str, str] = {}
    """What workers have told for the others."""
    replicas: dict[int, int] = {}
    """The worker that trains each slot's replica, or had it when it died; where they train apart, on several machines."""
    machines: dict[int, Machine] = {}
    awaited: int = 0
    """How many machines must be there before the first worker starts; 0: they are, or have been."""
    homes: dict[int, int] = {}
    """The machine of each worker that was ever started."""
    places: dict[int, int] = {}
    """Which of its machine's places each one has: whose GPU."""
    pids: dict[int, int] = {}
    exits: dict[int, int] = {}
    """Exit codes of the workers that have ended."""
    servers: list[int] = []
    """Which numbers are not workers' but servers', from the first one on."""
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    rolled: Rolled = msgspec.field(default_factory=Rolled)
    doomed: list[int] = []
    """Workers that are to be ended."""
    buried: list[int] = []
    """Workers that nobody waits for any more: dead, or on a machine that was lost."""
    led_from: int = 0
    """The machine of the agent that leads."""
    main_ready: bool = False
    """Main has come to prepare()."""
    deaths: int = 0
    """That those who train had to recover from: not those of workers that had not joined."""
    servers_lost: int = 0
    leaders_lost: int = 0
    """Those that did not lead to the run's end, and were not told to go."""
    raised: list[Raised] = []
    """Exceptions that were taken for their workers' own fault."""
    failure: Failure | None = None
    stop: Stop = Stop.NONE
    killed: str = ""
    """Why all were killed."""
    exit_code: int | None = None
    """The run's, when it is over."""
    faults: dict[str, Any] = {}
    """How far the plan of faults has come."""

    @staticmethod
    def begin(
        workers: int,
        spares: int,
        starts_left: int,
        now: float,
        here: Machine | None = None,
        machines: int = 1,
        servers: Sequence[int] = (),
    ) -> Journal:
        """Begin on this machine, as soon as so many are there."""
        membership = Membership.begin(workers, starts_left, spares)
        journal = Journal(membership, now, {1: membership.settled}, awaited=machines, servers=list(servers))
        journal.machines[0] = here or Machine("", "")
        if machines == 1:
            journal.settle_in()
        return journal

    @property
    def complete(self) -> bool:
        """Whether all machines are there that the beginning waits for, and every worker has a place."""
        return len(self.machines_here) >= self.awaited and self.room >= len(self.membership.standing)

    def settle_in(self) -> None:
        """Every worker of the beginning gets its place, neighbours on one machine as far as it has room."""
        here = {home: machine.places for home, machine in self.machines.items() if machine.here}
        count = len(self.membership.standing)
        spots = [(home, place) for home, places in here.items() for place in range(min(places, count))]
        for number, (home, place) in zip(self.membership.standing, spots, strict=False):
            self.homes[number], self.places[number] = home, place
        for number in self.servers:
            self.homes[number] = self._home_for_a_server()
        self.awaited = 0
        self.membership.room = self.room

    @property
    def machines_here(self) -> list[int]:
        return [number for number, machine in self.machines.items() if machine.here]

    @property
    def room(self) -> int:
        """How many workers the machines that are here have places for."""
        return sum(machine.places for machine in self.machines.values() if machine.here)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(raw: bytes) -> Journal:
        return msgspec.msgpack.decode(raw, type=Journal)

    def enter(self, instructions: list[Instruction]) -> list[View]:
        """Note down what the membership has decided; its new views."""
        fresh = []
        for instruction in instructions:
            match instruction:
                case Publish(view, agreed, _):
                    fresh.append(view)
                    self.views[view.term] = view
                    if not agreed:
                        for term in range(1, view.term):
                            self.after.setdefault(term, view.term)
                case Start(number, _):
                    self.homes[number], self.places[number] = self._free_spot()
                case Kill(number, _):
                    self.doomed.append(number)
        return fresh

    def claim(self, worker: int, slots: Sequence[int]) -> int | None:
        """The first of these slots whose replica no living worker has is this one's now; if it has one, that."""
        standing = self.membership.standing

        def lives(number: int) -> bool:
            return standing.get(number, Standing.GONE) is not Standing.GONE

        free = [slot for slot in slots if slot not in self.replicas or not lives(self.replicas[slot])]
        mine = next((slot for slot, owner in self.replicas.items() if owner == worker), None)
        if mine is None and free and lives(worker):
            mine = free[0]
            self.replicas[mine] = worker
        return mine if lives(worker) else None

    def _free_spot(self) -> tuple[int, int]:
        """The emptiest machine, and its first free place."""
        taken: dict[int, set[int]] = {home: set() for home, machine in self.machines.items() if machine.here}
        for number, home in self.homes.items():
            if number not in self.exits and number in self.places and home in taken:
                taken[home].add(self.places[number])
        home = max(taken, key=lambda home: self.machines[home].places - len(taken[home]))
        return home, next(place for place in range(len(taken[home]) + 1) if place not in taken[home])

    def add_server(self) -> int:
        """One more; its number."""
        number = self.servers[-1] + 1
        self.servers.append(number)
        self.homes[number] = self._home_for_a_server()
        return number

    def _home_for_a_server(self) -> int:
        """The machine that has fewest of them."""
        here = self.machines_here or [self.led_from]
        there = [home for server, home in self.homes_of_servers.items() if server not in self.fleet.leaving]
        return min(here, key=lambda home: (there.count(home), home))

    @property
    def homes_of_servers(self) -> dict[int, int]:
        """The machine of each server that was started, or is about to be, and has not ended."""
        return {self.role(number)[1]: self.homes[number] for number in self.running if number in self.servers}

    def role(self, number: int) -> tuple[str, int]:
        """What a process of this number is, and which one of its kind: ("server", 0), say."""
        return ("server", number - self.servers[0]) if number in self.servers else ("worker", number)

    def name(self, number: int) -> str:
        return "{} {}".format(*self.role(number))

    @property
    def running(self) -> list[int]:
        """Workers and servers that have been started, or are about to be, and have not ended."""
        return [number for number in self.homes if number not in self.exits]
