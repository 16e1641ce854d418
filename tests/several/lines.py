"""The way from a donor to a newcomer over the simulated network. The decisions are the real ones."""

from __future__ import annotations

from collections import deque

from paceline.errors import OvertakenError
from paceline.wires.pace import Pace
from tests.several.world import World


class Outlet:
    """The donor's end of the call of this number."""

    def __init__(self, world: World, donor: int, worker: int, call: int) -> None:
        self._world, self._donor, self.worker, self._name = world, donor, worker, f"entries-{call}"
        self._pace: Pace | None = None
        self._put = 0
        self._closed = False
        world.handlers[donor, self._name] = lambda source, tag, value: self._taken()

    @property
    def ended(self) -> bool:
        return self._closed or self._world.actors[self.worker].over

    def put(self, message: bytearray) -> None:
        if self._pace is None:
            self._pace = Pace(len(message))
        else:
            self._pace.put(len(message), self._world.events)
        self._put += 1
        self._world.send(self._donor, self.worker, self._name, self._put, (bytes(message), self._pace.near))

    def _taken(self) -> None:
        assert self._pace is not None
        self._pace.taken(self._world.events)

    def keep_pace(self) -> None:
        pace, world = self._pace, self._world
        if pace is not None and not pace.may_meet(world.events):
            world.waits_for_newcomers += 1
            world.wait(self._donor, lambda: self.ended or pace.may_meet(world.events), "waits for a newcomer")

    def close(self) -> None:
        self._closed = True


class Inlet:
    """The newcomer's end."""

    calls = 0

    def __init__(self, world: World, worker: int) -> None:
        self._world, self._worker = world, worker
        membership = world.journal.membership
        world.wait(worker, lambda: membership.needs(worker), "waits to be needed")
        self._donor = world.donor_of[worker] = world.random.choice(membership.settled.members)
        Inlet.calls += 1
        self._name = f"entries-{Inlet.calls}"
        self._came: deque[tuple[bytes, bool]] = deque()
        self.near, self._doing = False, "waits for the state"
        world.handlers[worker, self._name] = lambda source, tag, value: self._came.append(value)
        world.send(worker, self._donor, "heal", Inlet.calls, None)

    def take(self) -> memoryview:
        world, way = self._world, (self._donor, self._worker)

        def over() -> bool:
            return world.actors[self._donor].over and not world.channels.get(way)

        world.wait(self._worker, lambda: bool(self._came) or over(), self._doing)
        if not self._came:
            raise OvertakenError("the donor is gone")
        self._doing = "follows"
        message, self.near = self._came.popleft()
        world.send(self._worker, self._donor, self._name, "taken", None)
        return memoryview(message)

    def close(self) -> None:
        return
