"""Where else the state of a replica that trains apart lies, on several machines: what it leaves behind an exchange is brought to
another machine while it trains, and a newcomer gets the newest from wherever it is.

Which machine has the copies, and which state counts, is decided in `state.buddies`. Here are the threads: the *courier*, which
brings this replica's state to its machine's buddy, and one for each worker of another machine that brings or wants something.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline import waiting
from paceline.cluster.messages import Claim, Get, Needed, Value
from paceline.cluster.passage import Fetch, Leave, Passage, Survey
from paceline.cluster.stream import Check, connect
from paceline.errors import PacelineError, ResourceError
from paceline.state.buddies import NONE, buddy, foremost, keeper, newest
from paceline.state.lockers import Lockers

if TYPE_CHECKING:
    from paceline.session import Ask, Session

_AGAIN_S = 0.05
_LOOK_S = 0.1
"""So often the courier looks whether the buddy is still the same."""
_NO_ROOM = -1
Found = dict[int, list[int]]
"""What lies on each machine: by slot, the round at whose end its state was taken."""


class Copies:
    """Of this worker's replica. All methods are the script's thread's."""

    def __init__(self, session: Session) -> None:
        self._session, self._slots = session, session.settings.slots
        assert session.ticket is not None
        self._machine = session.ticket.machine
        ask = _taking_turns(session.line_of_its_own())
        self.lockers = Lockers(lambda name, size: session.segment(name, size, ask))
        self._inbox = Inbox(session, self.lockers)
        self._courier = Courier(session, self._machine, ask) if session.settings.state_copies else None

    def claim(self, slots: list[int]) -> int:
        """The first of these that no living worker has, on whichever machine; or another one. Wait for one."""
        wished = [*slots, *(slot for slot in range(self._slots) if slot not in slots)]
        while True:
            answer, _ = self._session.ask(Claim(wished))
            assert isinstance(answer, Value)
            if answer.value:
                self._inbox.own = int(answer.value)
                return self._inbox.own
            self._session.check_run()
            time.sleep(_AGAIN_S)

    # what this replica leaves

    def offer(self, slot: int) -> None:
        """What is in its locker now is brought to the buddy, beside what follows."""
        locker = self.lockers.of(slot)
        if self._courier is not None and not locker.empty:
            self._courier.offer(Parcel(slot, locker.rounds, locker.look()))

    def wait(self) -> None:
        """Until that is there: else this replica could be two exchanges behind when its machine is lost."""
        if self._courier is not None:
            waiting.for_copy(self._session, self._courier.is_there)

    def close(self) -> None:
        """The run is over: what is on its way need not come."""
        if self._courier is not None:
            self._courier.close()

    # what a newcomer gets

    def bring(self, slot: int, drops: bool) -> None:
        """Until the newest state of its replica lies on this machine, in a locker that is this worker's. Where replicas may have
        been dropped, one of those who went on comes too."""
        while True:
            found = self._survey()
            if found is not None and self._brought(found, slot, drops):
                return
            self._session.check_run()
            time.sleep(_AGAIN_S)
            self._session.take_view(self._session.ask(Needed())[0])

    def _brought(self, found: Found, slot: int, drops: bool) -> bool:
        """Whether it could be; all of it is tried again, if not."""
        machine, rounds = newest(found, slot, self._machine)
        latest = foremost(found)
        if latest == NONE:
            return False  # the others have not begun
        if rounds == NONE and latest <= 1 and any(0 in there for there in found.values()):
            # It died before it had left any state: then it began as all others did.
            start, there = next((at, there) for at, there in found.items() if 0 in there)
            return self._fetch(start, there.index(0), slot)
        if rounds < latest - 1 and not drops:
            raise PacelineError(
                f"replica {slot} was lost: its newest state that is left is {_words(rounds)}, and the others have had exchange "
                f"{latest}. With --state-copies one machine may be lost at a time, and its replicas' states are on "
                "another one. Go on from a checkpoint, if there is one (`paceline resume`)"
            )
        if drops and latest > rounds:
            other = next(k for k in range(self._slots) if any(there[k] == latest for there in found.values()))
            theirs, _ = newest(found, other, self._machine)
            if not self._fetch(theirs, other, other):
                return False
        return rounds == NONE or self._fetch(machine, slot, slot)

    def _survey(self) -> Found | None:
        """What lies where; None, if a machine that is in the run does not say."""
        found = {self._machine: rounds_of(self.lockers, self._slots)}
        homes = self._session.homes
        for machine in sorted({*homes.values()} - {self._machine}):
            said = self._of_a_member(machine, Survey, lambda passage: [passage.hear() for _ in range(self._slots)])
            if said is None:
                return None
            found[machine] = said
        return found

    def _fetch(self, machine: int, slot: int, target: int) -> bool:
        """What lies there of a slot into the locker of this one."""
        if machine == self._machine and slot == target:
            return True
        locker = self.lockers.of(target)
        if not locker.claim():
            return False

        def take(passage: Passage) -> bool:
            rounds = passage.hear()
            passage.receive(locker.room_for)
            locker.settle(rounds)
            return True

        try:
            if machine == self._machine:
                rounds, state = self.lockers.of(slot).copied()
                locker.room_for(state.nbytes)[:] = state
                locker.settle(rounds)
                return True
            return bool(self._of_a_member(machine, lambda worker: Fetch(slot, worker), take))
        finally:
            if target != self._inbox.own:
                locker.release()

    def _of_a_member(self, machine: int, label: Callable[[int], Any], take: Callable[[Passage], Any]) -> Any:
        """What the first worker of that machine says who answers; None if nobody does."""
        session = self._session
        assert session.ticket is not None
        for member in [member for member, home in session.homes.items() if home == machine]:
            check = _while_there(session, member)
            with suppress(OSError):
                answer, _ = session.ask(Get(f"link/{member}"), check)
                assert isinstance(answer, Value)
                sock = connect(answer.value, bytes.fromhex(session.ticket.secret), label(session.worker), check)
                with closing(Passage(sock, check)) as passage:
                    return take(passage)
        return None


class Parcel(NamedTuple):
    slot: int
    rounds: int
    state: memoryview
    """Where it lies: nothing else is put there before it has arrived, or the next one is offered."""


class Courier:
    """A thread that brings the last parcel to its machine's buddy; to the next one, if that is lost."""

    def __init__(self, session: Session, machine: int, ask: Ask) -> None:
        assert session.ticket is not None
        self._session, self._machine, self._ask = session, machine, ask
        self._secret = bytes.fromhex(session.ticket.secret)
        self._changed = threading.Condition()
        """Guards what follows."""
        self._parcel: Parcel | None = None
        self._there = NONE, NONE
        """The round of what has arrived last, and on which machine."""
        self._homes: dict[int, int] = {}
        self._refused = ""
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, parcel: Parcel) -> None:
        with self._changed:
            self._parcel, self._homes = parcel, dict(self._session.homes)
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
        return self._parcel is None or goal is None or self._there == (self._parcel.rounds, goal)

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
        still_there = _while_there(self._session, worker)

        def check() -> None:
            still_there()
            if self._parcel is not parcel:
                raise ConnectionError("another state is to be brought")

        answer, _ = self._ask(Get(f"link/{worker}"))
        assert isinstance(answer, Value)
        sock = connect(answer.value, self._secret, Leave(parcel.slot, self._session.worker), check)
        with closing(Passage(sock, check)) as passage:
            passage.say(parcel.rounds)
            passage.send(parcel.state)
            said = passage.hear()
        with self._changed:
            if said == parcel.rounds:
                self._there = parcel.rounds, homes[worker]
            else:
                self._refused = (
                    f"machine {homes[worker]} has no memory for a copy of replica {parcel.slot}'s state, twice "
                    f"{parcel.state.nbytes} bytes: raise --shm-limit or the container's memory, or pass --no-state-copies"
                )
            self._changed.notify_all()


class Inbox:
    """What workers of other machines bring here, and what they want; a thread for each."""

    def __init__(self, session: Session, lockers: Lockers) -> None:
        self._session, self._lockers, self._slots = session, lockers, session.settings.slots
        self.own = NONE
        """The slot of this worker's replica."""
        self._guard = threading.Lock()
        self._coming: dict[int, Passage] = {}
        """By slot, from whom a state is coming in."""
        assert session.listener is not None
        for kind, work in ((Leave, self._take_in), (Survey, self._tell), (Fetch, self._hand_out)):
            session.listener.serve(kind, self._served(work))

    def _served(self, work: Callable[[Any, Passage], None]) -> Callable[[Any, socket.socket], None]:
        def begin(label: Any, sock: socket.socket) -> None:
            passage = Passage(sock, _while_there(self._session, label.worker))

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
                rounds = passage.hear()
                passage.receive(locker.room_for)
                locker.settle(rounds)
            except ResourceError:
                passage.say(_NO_ROOM)
                return
            finally:
                locker.release()
            passage.say(rounds)
        finally:
            with self._guard:
                del self._coming[label.slot]

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
            passage.say(rounds)
            passage.send(state)


def rounds_of(lockers: Lockers, slots: int) -> list[int]:
    """What lies on this machine."""
    return [NONE if lockers.of(slot).empty else lockers.of(slot).rounds for slot in range(slots)]


def _taking_turns(ask: Ask) -> Ask:
    """For several threads."""
    turn = threading.Lock()

    def asked(message: Any) -> tuple[Any, list[int]]:
        with turn:
            return ask(message)

    return asked


def _while_there(session: Session, worker: int) -> Check:
    def check() -> None:
        session.check_run()
        if session.board.gone(worker):
            raise ConnectionError(f"worker {worker} is gone")

    return check


def _words(rounds: int) -> str:
    return "none" if rounds == NONE else f"that behind exchange {rounds}"
