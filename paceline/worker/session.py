"""How a process enters a run: started by an agent, or alone by plain `python`.

A session knows who this process is, where the run's folder lies, what the settings are, and who else is
there. It trains nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from paceline import __version__
from paceline.errors import Departed, EvictedError, MismatchError, PeerLostError, ResourceError, UsageError
from paceline.folder import DEFAULT_RUNS, RunFolder
from paceline.launch.environment import Ticket, ticket
from paceline.settings import PACKAGE, Origins, Settings, merge
from paceline.strategies import find
from paceline.tensors.peers import Peers, TermEnded
from paceline.wires.board import Board, Phase, Row
from paceline.wires.link import LAST_WORDS_S, LeaderLink, NoLeaderError
from paceline.wires.messages import (
    After,
    CaughtUp,
    Entering,
    Failed,
    Get,
    GoBack,
    Granted,
    Healed,
    Hello,
    Needed,
    Next,
    Put,
    Ready,
    Refused,
    RolledBack,
    Segment,
    Value,
    Welcome,
)
from paceline.wires.view import View
from paceline.worker import grouping
from paceline.worker.healing import Inlet, Outlet, call_donor, serve_newcomers

if TYPE_CHECKING:
    from paceline.wires.listener import Listener

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TELL_AFTER_S = 1.0
_OTHERS_MAY_SAY_S = 2.0
_POLL_S = 0.001


Ask = Callable[[Any], tuple[Any, list[int]]]
"""A line to the leader: its answer to a message, and descriptors that came with it."""


def user_line() -> str:
    """The innermost line of the user's own code that is running now, as file:line."""
    frame = _user_frame()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "the script"


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, _TORCH, "<frozen")):
        frame = frame.f_back
    return frame


def warn_of_user_line(text: str) -> None:
    """A warning at the user's own line: between that and here there are more frames or fewer, some of them torch's."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, UserWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


class Session:
    """Who this process is in the run."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ticket: Ticket | None = ticket()
        flags = self.ticket.flags if self.ticket else {}
        self.settings, self.origins = merge(flags, arguments)
        if self.ticket is not None and self.settings.servers != merge(flags, {})[0].servers:
            raise UsageError(
                f"{user_line()}: paceline.init() asks for servers, which are started before the script: give them to the "
                f"command, paceline run --strategy {self.settings.strategy} --servers {self.settings.servers}"
            )
        self.worker = self.ticket.worker if self.ticket else 0
        self.started = time.time()
        self._at = "starting"
        self.left: str | None = None
        """Where the script left a loop over its loader before the end, if it did."""
        self.resume_from = self.ticket.resume if self.ticket is not None else ""
        """The checkpoint that this run goes on from, until it has."""
        self.link: LeaderLink | None = None
        self.apart = False
        """Whether the run may be on several machines."""
        self.ends_apart = False
        """Whether a death may end a term for some a meeting later than for others: so in all terms of the run, whichever
        its group's kind is then."""
        self.hands_over = True
        """Whether a newcomer is given the run's state at a place where all wait for that. Not on several machines, where it
        heals behind the others; unless the parameters are at servers: then there is little to give."""
        self.loose = False
        """Whether workers do not meet in every step."""
        self.recoveries = 0
        """Workers that the run has lost and gone on without, as of this view."""
        self.homes: dict[int, int] = {0: 0}
        """The machine of each member of this view."""
        self.listener: Listener | None = None
        """Where workers of other machines come in, if there may be any."""
        if self.ticket is None:
            self.folder = RunFolder.create(Path(os.environ.get("PACELINE_RUNS", DEFAULT_RUNS)), None)
            self.board = Board.create(1)
            self.view = View(1, (0,))
        else:
            self.folder = RunFolder(Path(self.ticket.folder))
            self.link = self._link(self.ticket)
            answer, fds = self.link.greet()
            assert isinstance(answer, Welcome)
            self.board = Board(fds[0], answer.rows)
            self.take_view(answer)
            if self.ticket.host:
                self._listen(self.ticket)
        self.joining = self.worker not in self.view.members
        """A newcomer: until it has entered a view it runs its script alone."""
        self.row: Row = self.board.row(self.worker)
        self.row.describe(pid=os.getpid())
        if self.launched and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # A machine's notice that it goes down: leave at a step's end.
            signal.signal(signal.SIGTERM, lambda signum, frame: self.row.wishes_to_leave())
        self.device = _device(self.settings)
        self.ends_apart = self.apart or (self.launched and grouping.transport(self) != "shm")
        torch.set_num_threads(self.settings.threads)

    def _listen(self, ticket: Ticket) -> None:
        from paceline.wires.listener import Listener

        self.apart, self.hands_over = True, find(self.settings.strategy).servers
        self.listener = Listener(ticket.host, bytes.fromhex(ticket.secret))
        self.ask(Put(f"link/{self.worker}", self.listener.address))

    def _link(self, ticket: Ticket) -> LeaderLink:
        def fence() -> int:
            """The board knows who leads; before it is there, the ticket says who led."""
            return max(ticket.fence, self.board.leader) if hasattr(self, "board") else ticket.fence

        greeting = Hello(self.worker, os.getpid())
        return LeaderLink(ticket.address, bytes.fromhex(ticket.secret), greeting, fence, self.settings.grace)

    def ask(self, message: Any, check: Callable[[], None] | None = None) -> tuple[Any, list[int]]:
        """The leader's answer. Whoever leads: a question outlives the one it was put to."""
        assert self.link is not None
        try:
            return self.link.ask(message, check or self.check_run)
        except NoLeaderError as error:
            raise PeerLostError(f"{error}: this worker gives up") from None

    def check_run(self) -> None:
        """Raises if waiting is in vain."""
        if self.board.abort:
            raise PeerLostError("the run is stopping")
        self.check_own_place()

    def check_own_place(self) -> None:
        """A worker that was frozen for too long is not in the run any more when it thaws."""
        if self.board.gone(self.worker):
            raise EvictedError("this worker was taken for dead, and the others have gone on without it")

    @property
    def at(self) -> str:
        """What this worker is doing, in words for a message to the others."""
        return self._at

    @at.setter
    def at(self, words: str) -> None:
        self._at = words
        self.row.leave_place()  # where it last waited says nothing any more

    @property
    def workers(self) -> int:
        return 1 if self.joining else len(self.view.members)

    @property
    def rank(self) -> int:
        return 0 if self.joining else self.view.members.index(self.worker)

    @property
    def is_main(self) -> bool:
        """Whether this worker writes the run's files; not if it was taken for dead meanwhile."""
        if self.joining or self.board.gone(self.worker):
            return False
        if self.loose:  # a view is entered where they meet: until then the first that is alive is main
            return next(member for member in self.view.members if not self.board.gone(member)) == self.worker
        return self.view.members[0] == self.worker

    @property
    def slower(self) -> float:
        """How many times as long this worker should take: a fault on purpose."""
        return self.board.slow(self.worker)

    @property
    def launched(self) -> bool:
        return self.ticket is not None

    @property
    def dry_run(self) -> bool:
        """Started only to see what the settings come to."""
        return self.ticket is not None and self.ticket.dry_run

    def write_config(self) -> None:
        config = {
            "settings": self.settings.__dict__,
            "origins": self.origins,
            "device": str(self.device),
            "script": sys.argv[0],
            "arguments": sys.argv[1:],
            "versions": {
                "paceline": __version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            "started": self.started,
        }
        self.folder.write_json(self.folder.config, config)

    # the others

    def next_view(self) -> View:
        """A worker of this term is gone: the view of those who remain."""
        self.take_view(self.ask(After(self.view.term))[0])
        if self.worker not in self.view.members:
            raise PeerLostError("this worker is not in the run any more")
        return self.view

    def announced(self, needed: int) -> int:
        """Wait for the next change of the view: its term. The run cannot go on before `needed` workers are there."""
        self.row.enter(Phase.REFILL)
        told = False
        while True:
            term = self.board.next_term  # before the rest: what it follows is on the board by then
            self.check_run()
            self._check_members()
            if term > self.view.term:
                return term
            if self.board.reach < needed and self.loose and not self._may_come_elsewhere(needed):
                raise PeerLostError(
                    f"--strategy {self.settings.strategy} has {needed} replicas, one a worker, and only {self.board.reach} workers "
                    "will be there. Go on from a checkpoint, if there is one (`paceline resume`)"
                )
            if self.board.reach_with_room < needed:
                raise UsageError(
                    f"a flat loop with {needed} slots, and only {self.board.reach_with_room} workers will be there. Add the inner "
                    "loop `for x, y in run.slots():` around forward and backward: then any number of workers will do"
                )
            if self.board.reach < needed and self.is_main and not told:
                told = True
                self._tell_short(needed)
            self.give_up_unled()
            time.sleep(_POLL_S)

    def _may_come_elsewhere(self, needed: int) -> bool:
        """Whether lost replicas may be on a machine that is left, and only a place is missing."""
        return self.apart and self.settings.state_copies and self.board.reach_with_room >= needed

    def _tell_short(self, needed: int) -> None:
        """Machines have gone, and the others have too few places."""
        places = f"those that are left have places for {self.board.reach} workers"
        if self.loose:
            self.notice(
                f"{needed} replicas, one a worker, wait for a machine: {places} (let one join: paceline agent --join)"
            )
        else:
            self.notice(
                f"a flat loop with {needed} slots waits for a machine: {places} (let one join: paceline agent --join; or add the "
                "inner loop over run.slots(), which needs none)"
            )

    def _check_members(self) -> None:
        """Whether this worker's view is over: where terms end apart, one who is gone may have left as agreed."""
        if self.ends_apart:
            self._check_term()
            return
        for member in self.view.members:
            if self.board.gone(member):
                raise TermEnded(f"worker {member} is gone")

    def give_up_unled(self) -> None:
        """Raises if nobody has led the run for too long."""
        if self.board.unled_s > self.settings.grace:
            raise PeerLostError(f"no agent has led the run for {self.settings.grace:.0f} s: this worker gives up")

    @property
    def overtaken(self) -> bool:
        """Whether this worker's view is over: another one has followed a death in it."""
        return self.board.overtaken > self.view.term

    @property
    def next_term(self) -> int:
        """The term that this worker would enter at the step's end. Where terms end apart, one whose view is over agrees to
        none: the others might enter that while it is on its way to the one that followed."""
        return 0 if self.ends_apart and self.overtaken else self.board.next_term

    def enter(self, term: int) -> View:
        """The view that all have agreed to enter now; a member that is not in it leaves the run."""
        answer, _ = self.ask(Entering(term))
        if isinstance(answer, Next):
            self.take_view(answer)
        if self.worker in self.view.members:
            self.joining = False
        elif not self.joining:
            self.row.enter(Phase.LEFT)
            raise Departed
        return self.view

    def join(self) -> View:
        """A newcomer's way in: wait for the view it is in."""
        self.row.enter(Phase.JOINING)
        self.take_view(self.ask(Ready())[0])
        self.joining = False
        return self.view

    def needed(self) -> None:
        """Wait until this newcomer is to train: it may be a spare."""
        self.take_view(self.ask(Needed())[0])

    def lost(self) -> list[int]:
        """All workers of the run that are dead and reaped."""
        return self.board.lost

    def donor(self) -> Inlet:
        """A newcomer's other way in, while the others train: the line from a member that has the run's state."""
        return call_donor(self)

    def caught_up(self) -> None:
        self.ask(CaughtUp())

    def healed(self) -> None:
        self.ask(Healed())

    def rolled_back(self, step: int) -> None:
        """Where a run goes on that has lost its parameters. All say so: any of them may be gone by now."""
        self.ask(RolledBack(step))

    def go_back(self, why: str) -> NoReturn:
        """The run cannot go on where it is: all of it begins again at its newest checkpoint, with other processes than this."""
        self.ask(GoBack(why))
        while True:
            self.check_run()
            self.give_up_unled()
            time.sleep(_POLL_S)

    def on_newcomer(self, called: Callable[[Outlet], None]) -> None:
        """From now on newcomers may call this worker as their donor."""
        serve_newcomers(self, called)

    def take_view(self, answer: Any) -> None:
        """Ranks follow the machines, in the order in which they first come; so main stays the first."""
        assert isinstance(answer, Next | Welcome)
        self.recoveries = answer.deaths
        self.homes = dict(zip(answer.members, answer.homes, strict=True))
        order = list(dict.fromkeys(answer.homes))
        self.view = View(answer.term, tuple(sorted(answer.members, key=lambda member: order.index(self.homes[member]))))

    def peers(self) -> Peers:
        """The group of this view."""
        return grouping.build(self)

    def fact(self, key: str) -> str:
        """What another worker of this view has told. It may be gone before it does."""

        def check() -> None:
            self.check_run()
            if self.ends_apart:
                self._check_term()

        answer, _ = self.ask(Get(key), check)
        assert isinstance(answer, Value)
        return answer.value

    def line_of_its_own(self) -> Ask:
        """To ask from another thread."""
        assert self.ticket is not None
        link = self._link(self.ticket)

        def ask(message: Any) -> tuple[Any, list[int]]:
            try:
                return link.ask(message, self.check_run)
            except NoLeaderError as error:
                raise PeerLostError(f"{error}: this worker gives up") from None

        return ask

    def segment(self, name: str, size: int, ask: Ask | None = None) -> int:
        """`ask`: by another line than this thread's."""
        answer, fds = (ask or self.ask)(Segment(name, size))
        if isinstance(answer, Refused):
            raise ResourceError(answer.why)
        assert isinstance(answer, Granted)
        return fds[0]

    @property
    def lasting_segments(self) -> Callable[[str, int], int] | None:
        """Memory that all workers of the run share, and that outlives them; None where they have none."""
        return None if self.ticket is None or self.apart or self.dry_run else self.segment

    # while waiting: see tensors.peers.Watch

    def where(self) -> str:
        """Where this worker is, for the others' eyes."""
        left = f", having left the loop over the loader at {self.left}" if self.left else ""
        return f"{self.at} ({user_line()}){left}"

    def check(self, seconds: float, laggard: int) -> None:
        worker = self.view.members[laggard]
        self.check_own_place()
        if self.board.abort:
            raise PeerLostError(f"gave up waiting for worker {worker}: the run is stopping")
        if self.ends_apart:
            self._check_term()
        elif self.board.gone(worker):
            raise TermEnded(f"worker {worker} is gone")
        if seconds > _TELL_AFTER_S:
            self.row.place(self.where())
            self.row.waits_for(worker)

    def _check_term(self) -> None:
        """Where terms end apart: whoever is waited for, and not because somebody is gone, who may have left as agreed."""
        if self.overtaken:
            raise TermEnded(f"term {self.view.term} is over")

    def mismatch(self, others: list[int]) -> NoReturn:
        others = [self.view.members[other] for other in others]
        self.row.place(self.where())
        deadline = time.monotonic() + _OTHERS_MAY_SAY_S
        while time.monotonic() < deadline and not all(self.board.see(k).place for k in others):
            time.sleep(0.001)
        there = "; ".join(f"worker {k} is at {self.board.see(k).place or 'another place'}" for k in others)
        raise MismatchError(
            f"the workers came to different places in the script: worker {self.worker} is at {self.where()}; {there}. "
            "Every worker must take the same steps: leave a loop only on a condition that is the same on all "
            "(run.stop(reason) is an agreed stop)"
        )

    # the terminal

    def notice(self, text: str) -> None:
        """A line for the user that is not the script's output."""
        if self.launched:
            self.folder.event("notice", text, worker=self.worker, notice=text)
        else:
            sys.stderr.write(f"paceline: {text}\n")

    def leave(self) -> None:
        """This worker is done, as it should be."""
        self.row.finishes(self.view.term)
        if self.ticket is None:
            self.row.release()
            self.board.close()

    def fail(self, failed: Failed) -> bool:
        """Whether the leader was told."""
        if self.link is None:
            return False
        self.row.enter(Phase.FAILED)
        # Nobody else knows why this process ends. If it only follows another's end, they do.
        return self.link.tell(failed, 0.0 if failed.follows else LAST_WORDS_S)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self.link is not None:
            self.link.close()
            self.link = None


def _device(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.init()  # until then there is no generator to seed
        return torch.device("cuda", 0)
    if settings.device == "cuda":
        raise UsageError("--device cuda, but torch sees no GPU here: pass --device cpu, or install a CUDA build")
    return torch.device("cpu")


__all__ = ["Origins", "Session", "user_line"]
