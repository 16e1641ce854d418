"""A machine's part of a run: its workers, their board and shared memory, and the desk at which they ask.

On every machine one agent has this in hand, and another one stands by. What is to be done stands in the
run's journal. Whoever serves the node (`Leader`, `Follower`) has one, is told what happens to the workers,
and calls `follow` when the journal has changed. No torch in here.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from paceline.cluster.answering import Answering
from paceline.cluster.crew import Crew, Worker
from paceline.cluster.desk import Desk
from paceline.cluster.job import Job
from paceline.cluster.journal import End, Journal
from paceline.cluster.kept import BOARD
from paceline.cluster.memory import Segments
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.standby import Lead
from paceline.folder import RunFolder
from paceline.launch.environment import NEWEST, Ticket, nursery_environment, own_environment
from paceline.launch.nursing import Fork, Nursery, end_silent
from paceline.wires import wire
from paceline.wires.board import Abort, Board, Phase
from paceline.wires.connection import Connection
from paceline.wires.door import Door
from paceline.wires.messages import Ended

TICK_S = 0.1
GRACE_S = 1.5
"""After a failure the others get this long to notice and leave by themselves; then they are killed."""
_STANDBY_EVERY_S = 1.0
_SERVER = "paceline.servers.process"
_NURSERY = "nursery"
"""Under which name its pidfd outlives this agent."""
_NURSERY_S = 10.0
"""How long a nursery may take to answer who takes over: as long as torch takes to import."""
"""What a server runs, where a worker runs the script."""


class Replaced(Exception):
    """Another agent has this machine in hand now."""


class Master(Protocol):
    """Whoever serves a node: it has the journal, and is told what happens."""

    @property
    def journal(self) -> Journal: ...
    def worker_started(self, number: int, pid: int) -> None: ...
    def worker_ended(self, number: int, end: End) -> None: ...
    def worker_leaves(self, number: int) -> None: ...
    def evict(self, number: int, why: str) -> None:
        """It has been frozen for too long: kill it, so that it cannot come back."""

    def decide(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        """Something was asked that is not only about this machine; answer this peer."""


class Node:
    """`number`: which machine this is; `start_standby` starts the agent that takes over from this one."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        place: Rendezvous,
        lead: Lead,
        start_standby: Callable[[], subprocess.Popen[bytes]],
        hire: type[Crew] = Crew,
    ) -> None:
        self.job, self.folder, self.place, self.kept, self.fence = job, folder, place, lead.kept, lead.fence
        self.number, self._local = place.machine, lead.store
        board = lead.kept.get(BOARD)
        assert board is not None
        self.board = Board(os.dup(board[0]), board[1])
        self.selector = selectors.DefaultSelector()
        self.segments = Segments(job.settings.shm_limit, lead.kept, self._show_life)
        self.crew = hire(folder, self.board, self.selector, self._start_nursery, self._on_start, self._on_end)
        self.answering = Answering(self, folder, lead.kept)
        door = Door(wire.listen(f"{place.address}-{lead.fence}"), place.secret, time.monotonic())
        self.desk = Desk(door, self.selector, self.answering.answer, self.answering.known)
        self.master: Master
        self._start_standby = start_standby
        self._standby: subprocess.Popen[bytes] | None = None
        self._standby_at = 0.0
        self.exits: dict[int, End] = {}
        """Of each worker of this machine that was seen to end."""
        self._begun = False
        self.told_to_go = False
        """By SIGTERM: this machine shall leave the run."""

    # a life

    def begin(self, master: Master) -> None:
        """Take over what is there, and start what should be."""
        self.master = master
        self.check_hold()
        self.kept.on_keep, self.kept.on_release = self.answering.share, self.answering.unshare
        self.board.beat()
        if self.fence > 1 and not self._begun:
            self._find_nursery()
            self._adopt()
        self._begun = True
        self.follow()
        self._run_standby(time.monotonic())

    def _adopt(self) -> None:
        """The workers of the agent before."""
        for number in self.mine:
            pid = self.master.journal.pids.get(number)
            pidfd = self.kept.take(_pidfd_name(number))
            if pid is not None:
                self.crew.adopt(number, pid, pidfd)
            elif pidfd is not None:
                os.close(pidfd)  # nobody was told of it: the nursery will tell again

    def _find_nursery(self) -> None:
        try:
            nursery = Nursery.connect(self._nursery_address, self.place.secret, _NURSERY_S)
            nursery.ask_for_children()  # whose end the last agent may have been told alone
            self.crew.use(nursery)
        except OSError:
            if (kept := self.kept.get(_NURSERY)) is not None:
                end_silent(kept[0])
                self.kept.release(_NURSERY)
            self.folder.event("nursery lost", "it is gone, or says nothing; another one starts when needed")

    def turn(self, tick_s: float) -> float:
        """Deal with whatever happens, for a tick at most; the time."""
        for key, _ in self.selector.select(tick_s):
            # An earlier event of this batch may have been the end of this one.
            if self.selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)
        self._show_life()
        now = time.monotonic()
        self.crew.tick(now)
        for words in self.desk.tick(now):
            self.folder.event("refused", words)
        return now

    def check_hold(self) -> None:
        """Replaced: from now on this machine is another agent's. Before anything is given out that the next one must have
        too, and behind having sent it that (`standby`)."""
        if self.board.leader != self.fence:
            raise Replaced(f"fence {self.board.leader} has this machine; {self.fence} is over")

    def _show_life(self) -> None:
        self.check_hold()
        self.board.beat()

    def look_around(self, now: float) -> None:
        """At every worker: with many of them too dear to be done whenever one of them says something."""
        self.check_hold()
        self._write_board()  # again: an agent before this, frozen in the middle of that, may thaw and write what it knew
        self._see_frozen(now)
        for number in self.crew.numbers:
            if self.board.leaves(number):
                self.master.worker_leaves(number)
        self._run_standby(now)

    def send_workers_off(self) -> None:
        """They leave at a step's end."""
        for number in self.crew.numbers:
            self.board.row(number).wishes_to_leave()

    def leave(self, code: int) -> None:
        """The run is over here. When whoever watches hears of it, nothing of it is left here but this process."""
        self._local.remove(self.fence)
        Rendezvous.remove(self.folder, self.number)
        for peer in self.desk.shadows:
            peer.send(Ended(code))
        self.crew.close(quit_nursery=True)
        if self._standby is not None:
            try:
                self._standby.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._standby.kill()
                self._standby.wait()
        for peer in self.desk.watchers:
            peer.send(Ended(code))

    def close(self) -> None:
        self.crew.close(quit_nursery=False)
        self.desk.close()
        self.selector.close()
        self.board.close()
        self.kept.close()

    # what the journal says

    @property
    def mine(self) -> list[int]:
        """Workers that should be running on this machine."""
        journal = self.master.journal
        return [number for number in journal.running if journal.homes[number] == self.number]

    def follow(self) -> None:
        """Do what the journal says; all of it can be done twice."""
        self.show()
        journal = self.master.journal
        for number in self.mine:
            if number in journal.doomed and number not in self.crew.numbers and number not in self.exits:
                self._on_end(number, -signal.SIGKILL)  # it never came to be
            elif number in journal.doomed:
                self.crew.kill(number)
            elif number not in self.exits and number not in self.crew.numbers:
                self.start(number)
        for number in self.crew.numbers:  # those who were given up while this machine could not be reached
            if number in journal.exits:
                self.crew.kill(number)

    def show(self) -> None:
        """On the board, and to those who wait for an answer."""
        self._write_board()
        membership = self.master.journal.membership
        self.segments.forget_before(membership.settled.term, membership.pending is not None)
        self.answering.changed()

    def _write_board(self) -> None:
        journal, board = self.master.journal, self.board
        for number in journal.buried:
            board.bury(number)
        membership = journal.membership
        board.overtaken = max(journal.after.values(), default=0)  # before the next: who sees that one knows of this
        board.next_term = membership.pending.term if membership.pending else 0
        board.reach, board.reach_with_room = membership.reach, membership.reach_with_room
        board.stop = journal.stop
        if journal.main_ready:
            board.main_ready = True
        if journal.failure is not None:
            board.abort = Abort.WORKER_LOST
        elif journal.killed:
            board.abort = Abort.STOPPING

    # workers

    @property
    def _nursery_address(self) -> str:
        return f"{self.place.address}-nursery"

    def _start_nursery(self) -> Nursery:
        environment = nursery_environment(os.environ, self.job.settings.threads)
        nursery = Nursery.start(environment, self._log("nursery"), self._nursery_address, self.place.secret)
        self.kept.keep(_NURSERY, nursery.pidfd())
        return nursery

    def _log(self, role: str) -> Path:
        return self.folder.logs / f"{role}{f'-{self.number}' if self.number else ''}.log"

    def log_tail(self, role: str) -> str:
        """The last words of the nursery, say."""
        try:
            with open(self._log(role), errors="replace") as file:
                return file.read()[-4000:].rstrip()
        except OSError:
            return ""

    def start(self, number: int) -> None:
        job, place, journal = self.job, self.place, self.master.journal
        role, index = journal.role(number)
        ticket = Ticket(
            number,
            place.address,
            self.fence,
            place.secret.hex(),
            str(self.folder.path.absolute()),
            job.flags,
            job.dry_run,
            NEWEST if journal.rolled.times else job.resume,
            place.reach.host,
            self.number,
            server=index if role == "server" else -1,
        )
        self.board.row(number).enter(Phase.STARTING)
        log, append = str(self.folder.log_of(role, index)), bool(job.resume)
        if role == "server":
            self.crew.start(Fork(number, own_environment(ticket, 0, ()), log, append, ["-m", _SERVER]))
            return
        environment = own_environment(ticket, journal.places[number], place.gpus)
        target = ["-m", job.target] if job.as_module else [job.target]
        self.crew.start(Fork(number, environment, log, append, [*target, *job.arguments]))

    def _on_start(self, worker: Worker) -> None:
        self.kept.keep(_pidfd_name(worker.number), os.dup(worker.pidfd))
        self.master.worker_started(worker.number, worker.pid)

    def _on_end(self, number: int, code: int) -> None:
        """A worker has ended; what it said before comes first."""
        self.desk.hear_worker(number)
        self.kept.release(_pidfd_name(number))
        self.exits[number] = End(code, self.board.see(number).phase, self.board.finished_in(number))
        self.master.worker_ended(number, self.exits[number])

    def _see_frozen(self, now: float) -> None:
        """A worker or a server that is stopped for longer than its lease is evicted."""
        lease = self.job.settings.lease
        for worker in self.crew.frozen(now, lease):
            words = f"was frozen for {lease:g} s"
            role, index = self.master.journal.role(worker.number)
            notice = f"{role} {index} {words} (--lease), and is ended"
            self.folder.event("evicted", f"it {words}", **{role: index}, notice=notice)
            self.master.evict(worker.number, words)

    # the standby

    @property
    def standby_pid(self) -> int:
        return self._standby.pid if self._standby is not None and self._standby.poll() is None else 0

    def _run_standby(self, now: float) -> None:
        """There is one at any time: if it dies, another one starts."""
        if self.job.dry_run or self.standby_pid:
            return
        if now - self._standby_at >= _STANDBY_EVERY_S:
            self._standby_at, self._standby = now, self._start_standby()


def _pidfd_name(worker: int) -> str:
    return f"worker/{worker}"
