"""An exchange that goes on beside the training: a thread carries it out, in a group of its own.

What is exchanged was fixed when it began, so it does not matter when it is computed, or how often. So all of this may come
to nothing at any time: where the result is due all meet as ever, and each says how far it is (`State`). If all have the
result, it counts. If somebody has none (it has come in place of a lost one, or a death has ended it), nobody takes what it
has, and the same is exchanged again there, by the script's thread, with all that is known of deaths.

The group is one of the same view, by another name, which nobody else meets in; so the script's thread may meet at any time.
A group in which not all have come to the same end is never used again.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from paceline.errors import PeerLostError, ResourceError
from paceline.tensors.peers import Peers, TermEnded
from paceline.worker.grouping import build_beside

if TYPE_CHECKING:
    from paceline.worker.session import Ask, Session


class State(enum.IntEnum):
    """How far a replica is with an exchange beside its training."""

    LACKING = 0
    """There is no memory for it."""
    NOTHING = 1
    """It has not begun, or nothing came of it."""
    UNDER_WAY = 2
    THERE = 3


class Verdict(enum.Enum):
    """What becomes of an exchange beside the training, where its result is due."""

    TAKE = enum.auto()
    WAIT = enum.auto()
    """A moment, and say so once more."""
    AGAIN = enum.auto()
    """Whatever somebody has does not count."""


def decide(said: Sequence[int]) -> Verdict:
    """By what all have said: so all come to the same.

    >>> decide([3, 3, 3]), decide([3, 2, 3]), decide([3, 2, 1])
    (<Verdict.TAKE: 1>, <Verdict.WAIT: 2>, <Verdict.AGAIN: 3>)
    """
    if min(said) == State.THERE:
        return Verdict.TAKE
    # One who has begun would wait for ever for one who has not, or has given it up.
    return Verdict.WAIT if min(said) == State.UNDER_WAY else Verdict.AGAIN


class Beside:
    """At most one exchange at a time. All methods are the script's thread's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._group: _Group | None = None
        self._attempt: _Attempt | None = None
        self._sent_before = 0
        self._ask: Ask | None = None
        self._lacking = 0
        """The term in which somebody has no memory for it. Groups that come to nothing keep theirs until it ends."""

    def start(self, rounds: int, hold: Callable[[Peers], None]) -> None:
        """A thread calls `hold` with the group; so do the others' threads, for the exchange of this number."""
        assert self._attempt is None, "an exchange is still under way"
        if self._session.overtaken or self._lacking == self._session.view.term:
            return  # those of this view do not meet any more, or not so
        try:
            group = self._group_of(rounds)
        except TermEnded:
            return
        if group is not None:
            self._attempt = _Attempt(group, hold, self._session.settings.threads)

    def _group_of(self, rounds: int) -> _Group | None:
        """That of this view; a new one is named by the exchange at which all build it."""
        session = self._session
        if self._group is not None and self._group.term != session.view.term:
            self._abandon()
        if self._group is None and session.launched and session.workers > 1:
            self._ask = self._ask or session.line_of_its_own()
            self._group = _Group.of(session, f"group-{session.view.term}/beside-{rounds}", self._ask)
        return self._group

    @property
    def state(self) -> State:
        return State.NOTHING if self._attempt is None else self._attempt.state

    def wait(self, seconds: float) -> None:
        """Until it is over, so long at most."""
        if self._attempt is not None:
            self._attempt.join(seconds)

    def taken(self) -> None:
        """All have the result."""
        self._attempt = None

    def lacks(self) -> None:
        """Somebody has no memory for it: nobody begins one in this term any more."""
        self._lacking = self._session.view.term

    def end(self) -> None:
        """Whatever is under way, or there, does not count: it is called off."""
        if self._attempt is not None:
            self._abandon()

    def _abandon(self) -> None:
        assert self._group is not None
        self._group.watch.called_off = True
        if self._attempt is not None:
            self._attempt.join()
        self._sent_before += self._group.sent_bytes
        self._group.close()
        self._group = self._attempt = None

    @property
    def sent_bytes(self) -> int:
        return self._sent_before + (self._group.sent_bytes if self._group is not None else 0)

    def close(self) -> None:
        if self._group is not None:
            self._abandon()


class _Watch:
    """Ends the waits of a group beside the training: when it is called off, and with anybody's death."""

    def __init__(self, session: Session) -> None:
        self._session, self._view = session, session.view
        self.called_off = False

    def check(self, seconds: float, laggard: int) -> None:
        board = self._session.board
        if self.called_off:
            raise TermEnded("this exchange was called off")
        self._session.check_own_place()
        if board.abort:
            raise PeerLostError("an exchange beside the training was given up: the run is stopping")
        if board.overtaken > self._view.term or any(map(board.gone, self._view.members)):
            raise TermEnded(f"term {self._view.term} is over")

    def mismatch(self, others: list[int]) -> NoReturn:
        raise AssertionError(
            f"workers {others} came to another exchange beside the training than {self._session.worker}"
        )


class _Group:
    """Built by the first thread that needs it."""

    def __init__(self, term: int, build: Callable[[], Peers], watch: _Watch) -> None:
        self.term, self.watch = term, watch
        self._build: Callable[[], Peers] = build
        self._peers: Peers | None = None

    @staticmethod
    def of(session: Session, name: str, ask: Ask) -> _Group | None:
        watch = _Watch(session)
        build = build_beside(session, name, ask, watch)
        return None if build is None else _Group(session.view.term, build, watch)

    def peers(self) -> Peers:
        if self._peers is None:
            self._peers = self._build()
        return self._peers

    @property
    def sent_bytes(self) -> int:
        return self._peers.sent_bytes if self._peers is not None else 0

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()


class _Attempt:
    """A thread that holds one exchange."""

    def __init__(self, group: _Group, hold: Callable[[Peers], None], threads: int) -> None:
        self._group, self._hold, self._threads = group, hold, threads
        self._came = State.NOTHING
        self._error: BaseException | None = None
        # Behind what the script has asked its GPU for so far, and before what it asks for next.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        # A new one each time: it computes in the script's thread's floating-point environment of now.
        self._thread = threading.Thread(target=self._run, name="paceline-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a thread's own, and part of the bits
        try:
            with torch.cuda.stream(self._stream):
                self._hold(self._group.peers())
            self._came = State.THERE
        except TermEnded:
            pass
        except ResourceError:
            self._came = State.LACKING  # it may do for the exchange where its result is due
        except BaseException as error:  # noqa: BLE001  it is raised where the result is due
            self._error = error

    @property
    def state(self) -> State:
        if self._thread.is_alive():
            return State.UNDER_WAY
        if self._error is not None:
            raise self._error
        return self._came

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)
