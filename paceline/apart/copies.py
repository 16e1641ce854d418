"""Where else the state of a replica that trains apart lies, on several machines: what it leaves behind an exchange is brought to
another machine while it trains (`couriers`), and a newcomer gets the newest from wherever it is. Which machine has the copies, and which
state counts, is decided in `state.buddies`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from paceline.apart.couriers import Courier, Inbox, Parcel, rounds_of, while_there
from paceline.apart.passage import Fetch, Meter, Passage, Survey, take_state
from paceline.state.buddies import NONE, foremost, lost_for_good, newest
from paceline.state.lockers import Lockers
from paceline.wires.messages import Claim, Get, Needed, Value
from paceline.wires.stream import connect
from paceline.worker import waiting

if TYPE_CHECKING:
    from paceline.worker.session import Ask, Session

_AGAIN_S = 0.05
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
        self._meter = Meter()
        self._inbox = Inbox(session, self.lockers, self._meter)
        self._courier = Courier(session, self._machine, ask, self._meter) if session.settings.state_copies else None

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent of states so far, to other machines' workers."""
        return self._meter.sent_bytes

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
        if rounds == NONE and self._session.resume_from:
            # It died before it had left any state: it is in the checkpoint, and what has been agreed on since in another's.
            return self._fetch_foremost(found, latest)
        if rounds == NONE and latest <= 1 and any(0 in there for there in found.values()):
            # It died before it had left any state: then it began as all others did.
            start, there = next((at, there) for at, there in found.items() if 0 in there)
            return self._fetch(start, there.index(0), slot)
        if rounds < latest - 1 and not drops:
            raise lost_for_good(slot, _words(rounds), latest)
        if drops and latest > rounds and not self._fetch_foremost(found, latest):
            return False
        return rounds == NONE or self._fetch(machine, slot, slot)

    def _fetch_foremost(self, found: Found, latest: int) -> bool:
        """The state of one who has had the latest exchange, into its own locker here."""
        other = next(k for k in range(self._slots) if any(there[k] == latest for there in found.values()))
        machine, _ = newest(found, other, self._machine)
        return self._fetch(machine, other, other)

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
            take_state(passage, locker, lambda rounds: {}, again=True)
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
            check = while_there(session, member)
            with suppress(OSError):
                answer, _ = session.ask(Get(f"link/{member}"), check)
                assert isinstance(answer, Value)
                sock = connect(answer.value, bytes.fromhex(session.ticket.secret), label(session.worker), check)
                with closing(Passage(sock, check, self._meter)) as passage:
                    return take(passage)
        return None


def _taking_turns(ask: Ask) -> Ask:
    """For several threads."""
    turn = threading.Lock()

    def asked(message: Any) -> tuple[Any, list[int]]:
        with turn:
            return ask(message)

    return asked


def _words(rounds: int) -> str:
    return "none" if rounds == NONE else f"that behind exchange {rounds}"
