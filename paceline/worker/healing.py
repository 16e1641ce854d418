"""How a newcomer gets the run's state on several machines, while the others train.

It calls a member, its donor, which takes the state at its next step's end and sends it beside its training;
and behind it whatever comes of its meetings from then on. The newcomer goes through its script with that
(`tensors.following`), comes closer, and is let in like any newcomer, with nothing left to be handed over.
Where the others wait for it, as those of a flat loop do, it is told so instead: it comes in, and they hand it the state.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from paceline.errors import OvertakenError
from paceline.tensors.remembering import Met, Past
from paceline.tensors.snapshot import Snapshot
from paceline.wires.board import Phase
from paceline.wires.messages import Get, Needed, Value
from paceline.wires.view import View

if TYPE_CHECKING:
    from paceline.wires.stream import Taking
    from paceline.worker.session import Session

_AGAIN_S = 0.05


class Stateful(Protocol):
    """What a newcomer gets, and how."""

    def capture(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...


class Outlet(Protocol):
    """The way to one newcomer: see `wires.stream.Giving`."""

    worker: int
    ended: bool

    def put(self, message: bytearray) -> None: ...
    def keep_pace(self) -> None: ...
    def close(self) -> None: ...


class Inlet(Protocol):
    """The way from the donor: see `wires.stream.Taking`."""

    near: bool

    def take(self) -> memoryview: ...
    def close(self) -> None: ...


class Donor:
    """A member's side."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self._called: deque[Outlet] = deque()
        """Newcomers that wait for the next step's end. The listener's thread adds to them."""
        self._followers: list[Outlet] = []
        self._waves = False
        """Nobody is to follow: who calls is told to come in."""
        self._waved: list[Outlet] = []
        past.before, past.after = self._keep_pace, self._tell

    def called(self, outlet: Outlet) -> None:
        self._called.append(outlet)
        if self._waves:
            self.wave_in()

    def wave_in(self) -> None:
        """The others wait where a worker is missing, now and from now on: newcomers come in there. Also called by the
        listener's thread."""
        self._waves = True
        for outlet in [outlet for outlet in self._waved if outlet.ended]:
            with suppress(ValueError):  # the other thread had it
                self._waved.remove(outlet)
            outlet.close()
        while self._called:
            try:
                outlet = self._called.popleft()
            except IndexError:
                return  # the other thread had it
            self._waved.append(outlet)
            outlet.put(Snapshot(None).packed())

    def at_boundary(self, view: View, state: Stateful) -> None:
        """A step is over: who has called since the last one gets the state, and who has joined needs nothing more."""
        for outlet in [outlet for outlet in self._followers if outlet.ended or outlet.worker in view.members]:
            outlet.close()
            self._followers.remove(outlet)
        if not self._called:
            return
        packed = Snapshot([self._past.completed, [view.term, view.members], state.capture().tree]).packed()
        while self._called:
            self._followers.append(self._called.popleft())
            self._followers[-1].put(packed)

    def _tell(self, met: Met) -> None:
        followers = [outlet for outlet in self._followers if not outlet.ended]
        if followers:
            packed = met.pack()
            for outlet in followers:
                outlet.put(packed)

    def _keep_pace(self) -> None:
        for outlet in self._followers:
            outlet.keep_pace()

    def close(self) -> None:
        for outlet in (*self._called, *self._followers, *self._waved):
            outlet.close()


def receive_state(inlet: Inlet, past: Past, state: Stateful) -> View | None:
    """The donor's first message; the view that it was in. None: there is nobody to follow, all wait for this newcomer."""
    message = Snapshot.read(inlet.take()).tree
    if message is None:
        return None
    past.completed, view, tree = message
    state.restore(Snapshot(tree))
    return View(*view)


def call_donor(session: Session) -> Taking:
    """Wait until this newcomer is needed, and call a member: on its own machine, if there is one."""
    from paceline.wires.stream import reach

    assert session.ticket is not None
    session.row.enter(Phase.JOINING)
    secret, worker = bytes.fromhex(session.ticket.secret), session.worker
    while True:
        session.take_view(session.ask(Needed())[0])
        for donor in _donors(session.view, session.homes, session.ticket.machine, worker):
            check = _still_there(session, donor)
            try:
                check()
                answer, _ = session.ask(Get(f"link/{donor}"), check)
                assert isinstance(answer, Value)
                return reach(answer.value, secret, worker, check)
            except (OSError, OvertakenError):
                continue
        time.sleep(_AGAIN_S)


def _donors(view: View, homes: dict[int, int], machine: int, worker: int) -> list[int]:
    """Members in the order in which they are called. Newcomers that come together do not all call the same one.

    >>> _donors(View(1, (0, 1, 2, 3)), {0: 0, 1: 0, 2: 1, 3: 1}, machine=1, worker=5)
    [2, 3, 1, 0]
    """
    turn = worker % len(view.members)
    order = (*view.members[turn:], *view.members[:turn])
    return sorted(order, key=lambda member: homes[member] != machine)


def _still_there(session: Session, donor: int) -> Callable[[], None]:
    def check() -> None:
        session.check_run()
        if session.board.gone(donor):
            raise OvertakenError(f"worker {donor}, whom this newcomer followed, is gone")

    return check


def serve_newcomers(session: Session, called: Callable[[Outlet], None]) -> None:
    """From now on whoever calls is given to `called`, in the listener's thread."""
    from paceline.wires.stream import Giving, Heal

    def let_in(label: Heal, sock: socket.socket) -> None:
        def check() -> None:
            session.check_run()
            if session.board.gone(label.worker):
                giving.close()

        giving = Giving(label.worker, sock, check)
        called(giving)

    assert session.listener is not None
    session.listener.serve(Heal, let_in)
