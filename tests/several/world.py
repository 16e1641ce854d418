"""A run on several machines, simulated: one thing happens at a time, in an order drawn by a seed.

Workers are threads, of which one runs at a time until it waits. Messages, deaths and what the leader says
arrive one by one. A worker can be killed at any moment: of what it has sent, each of the others gets the
beginning, of any length. Membership is the real one.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.journal import Journal
from paceline.cluster.membership import GiveUp, Instruction, Kill, Publish, Standing, Start
from paceline.errors import Departed, OvertakenError, PeerLostError

_PATIENCE_S = 30.0


class Killed(BaseException):
    """Ends a worker's thread wherever it is."""


class Stuck(AssertionError):
    """Everybody waits, and nothing is on its way."""


@dataclass
class Board:
    """What a worker has been told so far."""

    overtaken: int = 0
    """The newest view that followed a death."""
    next_term: int = 0


class Actor:
    """A worker's thread. It runs only while the world waits for it."""

    def __init__(self, world: World, number: int, live: Callable[[int], None]) -> None:
        self.number, self._world, self._live = number, world, live
        self.gate = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.ends: Callable[[], bool] = lambda: False
        self.doing = "starting"
        self.noticed = self.killed = self.over = self.left = self.lingers = False
        self.overtaken: OvertakenError | PeerLostError | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.gate.acquire()
        try:
            if not self.killed:
                self._live(self.number)
        except Killed:
            pass
        except Departed:
            self.left = True
        except (OvertakenError, PeerLostError) as error:
            self.overtaken = error
        except BaseException as error:  # noqa: BLE001  the world raises it again
            self.error = error
        self.over = True
        self._world.turn.release()

    def resume(self) -> None:
        self.gate.release()
        if not self._world.turn.acquire(timeout=_PATIENCE_S):
            raise Stuck(f"worker {self.number} waits outside the simulation: {self.doing}")
        if self.over:
            self._thread.join(_PATIENCE_S)


@dataclass
class Fault:
    """One of the workers is killed (perhaps one that leaves, a newcomer's donor, or a member that is none), or asked to
    leave, or the first half of them, main too, as if their machine were: at the event of this number, or when somebody
    first does this."""

    at: int | str
    kind: str = "kill"


@dataclass
class World:
    workers: int
    starts_left: int
    seed: int
    live: Callable[[World, int], None]
    faults: list[Fault] = field(default_factory=list)
    pace: dict[Any, float] = field(default_factory=dict)
    """How fast each kind of thing happens; drawn where nothing is said."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.turn = threading.Semaphore(0)
        self.journal = Journal.begin(self.workers, 0, self.starts_left, 0.0)
        self.actors: dict[int, Actor] = {}
        self.boards: dict[int, Board] = {}
        self.letters: dict[int, deque[Board]] = {}
        self.channels: dict[tuple[int, int], deque[tuple[str, Any, Any]]] = {}
        self.inboxes: dict[tuple[int, str], dict[Any, Any]] = {}
        self.handlers: dict[tuple[int, str], Callable[[int, Any, Any], None]] = {}
        """Who hears at once what it is sent under a name, instead of looking for it."""
        self.news: list[Callable[[], None]] = []
        self.events, self._finished = 0, False
        self.story: list[str] = []
        self.donor_of: dict[int, int] = {}
        """Whom each newcomer has called last."""
        self.waits_for_newcomers = 0
        for number in range(self.workers):
            self._start(number)

    # what the workers do; each of these is called by the one whose turn it is

    def wait(
        self, number: int, until: Callable[[], bool], doing: str, ends: Callable[[], bool] = lambda: False
    ) -> bool:
        """Until this is so; or until the worker notices that this ends its wait, which may take it long. Whether it did."""
        actor = self.actors[number]
        actor.until, actor.ends, actor.doing, actor.noticed = until, ends, doing, False
        self.turn.release()
        actor.gate.acquire()
        if actor.killed:
            raise Killed
        return actor.noticed

    def send(self, source: int, to: int, group: str, tag: Any, value: Any) -> None:
        if not self.actors[source].killed and to in self.actors and not self.actors[to].over:
            self.channels.setdefault((source, to), deque()).append((group, tag, value))

    def inbox(self, number: int, group: str) -> dict[Any, Any]:
        return self.inboxes.setdefault((number, group), {})

    def linger(self, number: int, ended: Callable[[], bool]) -> bool:
        """Wait until all have finished; whether they have, or the term has ended."""
        actor = self.actors[number]
        actor.lingers = True
        self.wait(number, lambda: self.finished, "done", ended)
        actor.lingers = self.finished
        return actor.lingers

    # the leader

    def follow_up(self, instructions: list[Instruction]) -> None:
        self.journal.enter(instructions)
        pending = self.journal.membership.pending
        overtaken = max(self.journal.after.values(), default=0)
        for letters in self.letters.values():
            letters.append(Board(overtaken, pending.term if pending else 0))
        for instruction in instructions:
            match instruction:
                case Kill(number):
                    self._kill(number)
                case Start(number):
                    self._start(number)
                case Publish(view, agreed, why):
                    self.story.append(f"event {self.events}: {view} {'agreed' if agreed else 'at once'}: {why}")
                case GiveUp(why):
                    raise AssertionError(why)

    def _start(self, number: int) -> None:
        pending = self.journal.membership.pending
        overtaken = max(self.journal.after.values(), default=0)
        self.boards[number] = Board(overtaken, pending.term if pending else 0)
        self.letters[number] = deque()
        self.actors[number] = Actor(self, number, lambda number: self.live(self, number))

    def _kill(self, number: int) -> None:
        actor = self.actors[number]
        if actor.over:
            return
        self.story.append(f"event {self.events}: worker {number} is killed: {actor.doing}")
        actor.killed = True
        actor.resume()
        for (source, to), channel in self.channels.items():
            kept = self.random.randint(0, len(channel)) if source == number else 0 if to == number else len(channel)
            while len(channel) > kept:
                channel.pop()

    # what happens

    @property
    def finished(self) -> bool:
        """All who train are done; who waits to join has come too late."""
        standing = self.journal.membership.standing
        training = [a for a in self.actors.values() if not a.over and standing[a.number] not in _NOT_IN]
        self._finished = self._finished or (all(actor.lingers for actor in training) and not self.news)
        return self._finished

    def run(self) -> None:
        try:
            while not all(actor.over for actor in self.actors.values()):
                self._happens()
                if self.finished and all(a.over or not a.lingers for a in self.actors.values()):
                    break
        finally:
            for actor in self.actors.values():
                actor.killed = True
                if not actor.over:
                    actor.resume()

    def _happens(self) -> None:
        doing = {actor.doing for actor in self.actors.values() if not actor.over}
        for fault in [fault for fault in self.faults if fault.at == self.events or fault.at in doing]:
            self.faults.remove(fault)
            self._strike(fault)
        self.events += 1
        choices: list[tuple[Any, Callable[[], None]]] = []
        for number, actor in self.actors.items():
            if not actor.over and actor.until():
                choices.append((("worker", number), lambda actor=actor: self._resume(actor)))
            if not actor.over and actor.ends():
                choices.append((("notices", number), lambda actor=actor: self._notice(actor)))
            if self.letters[number] and not actor.over:
                choices.append((("board", number), lambda number=number: self._tell(number)))
        for way, channel in self.channels.items():
            if channel:
                choices.append((way, lambda way=way: self._deliver(way)))
        for new in self.news:
            choices.append(("news", lambda new=new: (self.news.remove(new), new())))
        if not choices:
            raise Stuck("; ".join(f"worker {a.number}: {a.doing}" for a in self.actors.values() if not a.over))
        paces = [self.pace.setdefault(name, 10 ** self.random.uniform(-1.7, 1.7)) for name, _ in choices]
        self.random.choices(choices, paces)[0][1]()

    def _resume(self, actor: Actor) -> None:
        actor.resume()
        if actor.error is not None:
            raise actor.error
        if actor.over and actor.left:
            self.story.append(f"event {self.events}: worker {actor.number} has left")
            self.news.append(lambda: self.follow_up(self.journal.membership.left(actor.number)))
        if actor.over and actor.overtaken is not None:
            self.story.append(f"event {self.events}: worker {actor.number} ends: {actor.overtaken}")
            self.news.append(lambda: self.follow_up(self.journal.membership.died(actor.number, "gave up")))

    def _notice(self, actor: Actor) -> None:
        actor.noticed = True
        self._resume(actor)

    def _tell(self, number: int) -> None:
        self.boards[number] = self.letters[number].popleft()

    def _deliver(self, way: tuple[int, int]) -> None:
        group, tag, value = self.channels[way].popleft()
        if (way[1], group) in self.handlers:
            self.handlers[way[1], group](way[0], tag, value)
        else:
            self.inbox(way[1], group)[way[0], tag] = value

    def _strike(self, fault: Fault) -> None:
        membership = self.journal.membership
        well = [m for m in membership.settled.members if not self.actors[m].over]
        staying = [m for m in well if membership.standing[m] is Standing.MEMBER]
        if fault.kind.startswith("leave") and len(staying) > 1:
            half = staying[: len(staying) // 2]
            for leaver in half if fault.kind == "leave together" else [self.random.choice(staying)]:
                self.story.append(f"event {self.events}: worker {leaver} shall leave")
                self.follow_up(membership.leave(leaver))
        if fault.kind.startswith("kill") and not self._finished:
            coming = [n for n, a in self.actors.items() if not a.over and n not in well]
            donors = {self.donor_of.get(number) for number in coming}
            of_kind = {
                "kill a leaver": [m for m in well if m not in staying],
                "kill a donor": [m for m in well if m in donors],
                "kill a bystander": [m for m in well if m not in donors],
            }
            victim = self.random.choice(of_kind.get(fault.kind) or [*well, *coming])
            if victim in coming or any(m != victim for m in staying):
                self._kill(victim)
                self.news.append(lambda: self.follow_up(membership.died(victim, "was killed")))


_NOT_IN = (Standing.STARTING, Standing.READY, Standing.GONE)
