"""The coordinator: what the leader decides about the run, written to the store before anybody is told.

`membership` says who is in the run; this is its shell: it notes down, publishes on the board, and has
workers started and killed. No torch in here.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.board import Abort, Board, Phase, Stop
from paceline.cluster.job import Job
from paceline.cluster.journal import Failure, Journal
from paceline.cluster.membership import GiveUp, Instruction, Kill, Publish, Standing, Start, View
from paceline.cluster.memory import Segments
from paceline.cluster.standby import Lead
from paceline.watch.folder import RunFolder

_KILLS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Signals that come from outside: the worker was well. A crash (SIGSEGV, …) would only repeat itself."""
_SEGMENT = re.compile(r"(?:group|state)-(\d{1,9})(?:[-/].*)?")


class Coordinator:
    """`start` and `kill` act on a worker by its number; `changed` is called when something has become known."""

    def __init__(
        self, job: Job, folder: RunFolder, lead: Lead, journal: Journal, board: Board, segments: Segments
    ) -> None:
        self._job, self._folder, self._store, self._fence = job, folder, lead.store, lead.fence
        self.journal, self.membership = journal, journal.membership
        self._board, self._segments = board, segments
        self.start: Callable[[int], None]
        self.kill: Callable[[int], None]
        self.changed: Callable[[], None]

    def save(self, views: list[View] | None = None) -> None:
        """FencedError: another agent leads, and nothing of this one's counts any more."""
        self._store.write(self._fence, self.journal.encode(), views or [])

    def take_over(self) -> None:
        """Whatever the last leader had decided and not yet done is done now; all of it can be done twice."""
        for number, standing in self.membership.standing.items():
            if standing is Standing.GONE:
                self._board.bury(number)
        self._board.stop = self.journal.stop
        if self.journal.failure is not None:
            self._board.abort = Abort.WORKER_LOST

    # who is in the run

    def follow_up(self, instructions: list[Instruction], buried: int | None = None) -> None:
        """Written down first; then told and done."""
        self.save(self.journal.enter(instructions))
        if buried is not None:
            self._board.bury(buried)
        self.announce()
        for instruction in instructions:
            match instruction:
                case Publish(view, agreed, why):
                    self._publish(view, agreed, why)
                case Start(number, why):
                    self._folder.event("starting a worker", why, worker=number)
                    self.start(number)
                case Kill(number, why):
                    self._folder.event("ending a worker", why, worker=number)
                    self.kill(number)
                case GiveUp(why):
                    self.fail("the run:", why, worker=max(self.journal.places))
        self.changed()

    def announce(self) -> None:
        """On the board: the change that all should agree on, if there is one, and how many can still come."""
        pending = self.membership.pending
        self._board.next_term = pending.term if pending else 0
        self._board.reach = self.membership.reach

    def _publish(self, view: View, agreed: bool, why: str) -> None:
        count = len(view.members)
        notice = {} if agreed else {"notice": f"{why}; going on with {count} worker{'s' * (count != 1)}"}
        self._folder.event("view", why, term=view.term, workers=list(view.members), **notice)
        if not agreed:
            self._segments.forget(lambda name: term_of(name) < view.term - 1)

    def joined(self, worker: int) -> None:
        """A newcomer has the run's state."""
        instructions = self.membership.healed(worker)
        if self.membership.settled.members[-1] == worker and not self.membership.pending:
            self._segments.forget(lambda name: name.startswith("state-"))
        self._folder.event("joined", "it has the run's state", worker=worker, notice=f"worker {worker} has joined")
        self.follow_up(instructions)

    def leavers(self) -> None:
        """Workers that were told to go (SIGTERM) leave at a step's end; if all are, the run stops."""
        for number in self.membership.settled.members:
            if self._board.leaves(number) and self.membership.standing[number] is Standing.MEMBER:
                self._folder.event("leaving", "it was told to end (SIGTERM)", worker=number)
                self.follow_up(self.membership.leave(number))
        if self.membership.all_leave and not self.journal.stop:
            self.stop(Stop.SIGTERM, "every worker was told to end (SIGTERM)")

    def scale(self, count: int) -> str:
        """Train with so many; why not, if that cannot be."""
        slots = self._slots()
        if not 1 <= count <= slots:
            return f"{count} workers for {slots} slots: a run trains with 1 to {slots} workers"
        if not self._job.survives_deaths:
            return "this run cannot change its workers: it uses groups of torch (--transport gloo or nccl)"
        self._folder.event("scaling", f"{count} workers were asked for", notice=f"going to {count} workers")
        self.follow_up(self.membership.scale(count))
        return ""

    def _slots(self) -> int:
        """The script's init() may have set them."""
        settings = self._folder.read_json(self._folder.config).get("settings", {})
        return int(settings.get("slots", self._job.settings.slots))

    # workers come and go

    def worker_started(self, number: int, pid: int) -> None:
        if self.journal.pids.get(number) == pid:
            return  # taken over from the last leader
        self.journal.pids[number] = pid
        self.save()
        place = self.journal.places[number]
        why = f"it stands for worker {place}" if place != number else "the run begins"
        why = "a spare, for whoever is lost" if place == number >= self._job.workers else why
        self._folder.event("worker started", why, worker=number, pid=pid)

    def worker_ended(self, number: int, code: int) -> None:
        self.journal.exits[number] = code
        self.save()
        self._folder.event("worker ended", exit_words(code), worker=number, exit_code=code)
        if self.membership.standing[number] is Standing.GONE:
            self._board.bury(number)  # whoever met it in a view that was overtaken must not wait for it
        if self.over or self.membership.standing[number] is Standing.GONE:
            return
        if code == 0 and self._board.see(number).phase == Phase.LEFT:
            self.follow_up(self.membership.left(number))
        elif code and not self._survives(number, code):
            trace = _crash_trace(self._folder.log_of("worker", number)) if code < 0 else ""
            self.fail(f"worker {number}", exit_words(code), trace, 1 if code < 0 else code, number)

    def _survives(self, number: int, code: int) -> bool:
        """Whether the run goes on without this worker, which has just ended."""
        a_newcomer = number not in self.membership.settled.members
        if not (a_newcomer and code < 0) and (code not in _KILLS or not self._job.survives_deaths):
            return False
        if self._board.see(number).phase == Phase.FINISHED:
            return True
        if self._job.workers == 1 and len(self.membership.settled.members) == 1 and not a_newcomer:
            return False  # its own words say it better than that nobody is left
        self.lose(number, exit_words(code))
        return self.journal.failure is None

    def lose(self, number: int, why: str) -> None:
        """The run goes on without this worker."""
        self.journal.deaths += 1
        self.follow_up(self.membership.died(number, why), buried=number)

    # the end

    @property
    def over(self) -> bool:
        return self.journal.failure is not None or bool(self.journal.killed)

    def fail(self, who: str, text: str, trace: str = "", exit_code: int = 1, worker: int = -1) -> None:
        if not self.over:
            self.journal.failure = Failure(who, text, trace, exit_code, worker, time.monotonic())
            self.save()
            self._board.abort = Abort.WORKER_LOST

    def stop(self, who: Stop, why: str, kill: bool = False) -> None:
        """After this step, or at once."""
        self.journal.stop = self.journal.stop or who
        if kill:
            self.journal.killed = why
        self.save()
        self._folder.event("stop asked for", why)
        self._board.stop = self.journal.stop
        if kill:
            self._board.abort = Abort.STOPPING
            for number in self.journal.running:
                self.kill(number)


def term_of(segment: str) -> int:
    """The term whose group asked for this segment.

    >>> term_of("group-3/memory-1"), term_of("state-4")
    (3, 4)
    """
    found = _SEGMENT.fullmatch(segment)
    if found is None:
        raise ValueError(f"{segment!r} is no name of a segment")
    return int(found[1])


def exit_words(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _crash_trace(path: Path) -> str:
    """What faulthandler wrote before a crash, if it did."""
    try:
        text = path.read_text(errors="replace")[-20000:]
    except OSError:
        return ""
    at = text.rfind("Fatal Python error")
    return text[at:].rstrip() if at >= 0 else ""
