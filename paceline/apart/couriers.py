"""The threads by which the states of replicas that train apart come to another machine: the *courier* brings this replica's to
its machine's buddy, and the *inbox* has one for each worker of another machine that brings or wants something.

Of a state that is brought, only what the replica of the worker there has not left too is sent (`state.alike`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.apart.passage import Fetch, Leave, Meter, Passage, Survey, send_state, take_state
from paceline.errors import PacelineError, ResourceError
from paceline.state.alike import lying
from paceline.state.buddies import NONE, buddy, keeper
from paceline.state.lockers import Lockers
from paceline.wires.messages import Get, Value
from paceline.wires.stream import Check, connect

if TYPE_CHECKING:
    from paceline.worker.session import Ask, Session

_AGAIN_S = 0.05
_LOOK_S = 0.1
"""So often the courier looks whether the buddy is still the same."""
_POLL_S, _PATIENCE_S = 0.002, 1.0
"""So long a copy waits until a replica that trains where it comes in has left its own state of that round."""
_NO_ROOM = -1


class Parcel(NamedTuple):
    slot: int
    rounds: int
    state: memoryview
    """Where it lies: nothing else is put there before it has arrived, or the next one is offered."""


class Courier:
    """A thread that brings the last parcel to its machine's buddy; to the next one, if that is lost."""

    def __init__(self, session: Session, machine: int, ask: Ask, meter: Meter) -> None:
        assert session.ticket is not None
        self._session, self._machine, self._ask, self._meter = session, machine, ask, meter
        self._secret = bytes.fromhex(session.ticket.secret)
        self._changed = threading.Condition()
        """Guards what follows."""
        self._parcel: Parcel | None = None
        self._offered = 0
        self._there = NONE, NONE
        """Which of those that were offered has arrived last, and on which machine. There may be two of a round: behind a loop, and
        where the next one begins."""
        self._homes: dict[int, int] = {}
        self._refused = ""
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, parcel: Parcel) -> None:
        with self._changed:
            self._parcel, self._homes = parcel, dict(self._session.homes)
            self._offered += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="paceline-courier", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_there(self, seconds: float) -> bool:
        """Whether it is on the buddy of the session's view; waits for that so long at most."""
        with self._changed:
            if self._homes != self._session.homes:
                self._homes = dict(self._session.homes)
                self._changed.notify_all()
            if not self._done and not self._refused:
                self._changed.wait(seconds)
            if self._refused:
                raise ResourceError(self._refused)
            return self._done

    def close(self) -> None:
        with self._changed:
            self._closed, self._parcel = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def _alive(self) -> dict[int, int]:
        """As the next view will have them."""
        return {worker: home for worker, home in self._homes.items() if not self._session.board.gone(worker)}

    @property
    def _done(self) -> bool:
        goal = buddy(self._machine, self._alive.values())
        return self._parcel is None or goal is None or self._there == (self._offered, goal)

    # the thread

    def _serve(self) -> None:
        while (parcel := self._next()) is not None:
            with self._changed:
                homes = self._alive
            try:
                self._carry(parcel, homes)
            except (OSError, PacelineError):  # it went away, or is not ready yet
                with self._changed:
                    self._changed.wait(0 if self._closed else _AGAIN_S)

    def _next(self) -> Parcel | None:
        """What is not where it should be, once there is such; nothing at the end."""
        with self._changed:
            while (self._done or self._refused) and not self._closed:
                self._changed.wait(_LOOK_S)
            return self._parcel

    def _carry(self, parcel: Parcel, homes: dict[int, int]) -> None:
        worker = keeper(parcel.slot, self._machine, homes)
        if worker is None:
            return
        still_there = while_there(self._session, worker)

        def check() -> None:
            still_there()
            if self._parcel is not parcel:
                raise ConnectionError("another state is to be brought")

        answer, _ = self._ask(Get(f"link/{worker}"))
        assert isinstance(answer, Value)
        sock = connect(answer.value, self._secret, Leave(parcel.slot, self._session.worker), check)
        with closing(Passage(sock, check, self._meter)) as passage:
            send_state(passage, parcel.rounds, parcel.state)
            said = passage.hear()
        with self._changed:
            if said == parcel.rounds:
                if self._parcel is parcel:
                    self._there = self._offered, homes[worker]
            else:
                self._refused = (
                    f"machine {homes[worker]} has no memory for a copy of replica {parcel.slot}'s state, twice "
                    f"{parcel.state.nbytes} bytes: raise --shm-limit or the container's memory, or pass --no-state-copies"
                )
            self._changed.notify_all()


class Inbox:
    """What workers of other machines bring here, and what they want; a thread for each."""

    def __init__(self, session: Session, lockers: Lockers, meter: Meter) -> None:
        self._session, self._lockers, self._slots = session, lockers, session.settings.slots
        self._meter = meter
        self.own = NONE
        """The slot of this worker's replica."""
        self._guard = threading.Lock()
        self._coming: dict[int, Passage] = {}
        """By slot, from whom a state is coming in."""
        self._begun: set[int] = set()
        """Slots of which some of a state has come, and the rest has not yet."""
        assert session.listener is not None
        for kind, work in ((Leave, self._take_in), (Survey, self._tell), (Fetch, self._hand_out)):
            session.listener.serve(kind, self._served(work))

    def _served(self, work: Callable[[Any, Passage], None]) -> Callable[[Any, socket.socket], None]:
        def begin(label: Any, sock: socket.socket) -> None:
            passage = Passage(sock, while_there(self._session, label.worker), self._meter)

            def serve() -> None:
                with closing(passage), suppress(OSError, PacelineError):
                    work(label, passage)

            threading.Thread(target=serve, name=f"paceline-inbox-{label.worker}", daemon=True).start()

        return begin

    def _take_in(self, label: Leave, passage: Passage) -> None:
        """Who is hung up on calls again."""
        if not self._begins(label.slot, passage):
            return
        locker = self._lockers.of(label.slot)
        try:
            if not locker.claim():
                return  # its replica trains on this machine, or another worker of it has it in hand
            try:
                again = label.slot in self._begun
                self._begun.add(label.slot)
                rounds = take_state(passage, locker, self._known, again)
                self._begun.discard(label.slot)
            except ResourceError:
                rounds = _NO_ROOM
            finally:
                locker.release()
            passage.say(rounds)
        finally:
            with self._guard:
                del self._coming[label.slot]

    def _known(self, rounds: int) -> dict[bytes, memoryview]:
        """What this worker's own replica has left behind the same exchange: it may be about to."""
        if self.own == NONE:
            return {}
        own, until = self._lockers.of(self.own), time.monotonic() + _PATIENCE_S
        while (own.empty or own.rounds < rounds) and time.monotonic() < until:
            self._session.check_run()
            time.sleep(_POLL_S)
        return {} if own.empty or own.rounds != rounds else lying(own.look())

    def _begins(self, slot: int, passage: Passage) -> bool:
        """Whether this one may come in now: one at a time of each slot, and the last who has called goes on."""
        with self._guard:
            if slot not in range(self._slots) or slot == self.own:
                return False
            before = self._coming.setdefault(slot, passage)
            if before is not passage:
                before.end()
            return before is passage

    def _tell(self, label: Survey, passage: Passage) -> None:
        passage.say(*rounds_of(self._lockers, self._slots))

    def _hand_out(self, label: Fetch, passage: Passage) -> None:
        if label.slot in range(self._slots) and not self._lockers.of(label.slot).empty:
            rounds, state = self._lockers.of(label.slot).copied()
            send_state(passage, rounds, state)


def rounds_of(lockers: Lockers, slots: int) -> list[int]:
    """What lies on this machine."""
    return [NONE if lockers.of(slot).empty else lockers.of(slot).rounds for slot in range(slots)]


def while_there(session: Session, worker: int) -> Check:
    def check() -> None:
        session.check_run()
        if session.board.gone(worker):
            raise ConnectionError(f"worker {worker} is gone")

    return check
