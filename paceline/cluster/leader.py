"""The agent that leads: one loop over workers, questions and the clock. No torch in here.

It is not on the path of a step. If it dies or freezes, the standby goes on from the store under the
next fence; if it thaws, it finds itself fenced and steps down.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable

from paceline.cluster import messages
from paceline.cluster.answering import Answering
from paceline.cluster.board import Board, Phase, Seen, Stop
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.crew import Crew, NurseryError, Worker
from paceline.cluster.desk import Desk
from paceline.cluster.ending import conclude
from paceline.cluster.injection import Injection
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.kept import BOARD
from paceline.cluster.memory import Segments
from paceline.cluster.nursing import Fork, Nursery
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.standby import Lead
from paceline.cluster.store import FencedError
from paceline.launch.environment import Ticket, nursery_environment, own_environment
from paceline.watch.folder import RunFolder
from paceline.watch.verdict import QUIET_S, verdict

_TICK_S = 0.1
_GRACE_S = 1.5
"""After a failure the others get this long to notice and leave by themselves; then they are killed."""
_ODD_EXIT_S = 1.0
_STANDBY_EVERY_S = 1.0
_NO_KILL = "PACELINE_EVICT_WITHOUT_KILL"
"""Set by a test: what if the kill of a frozen worker came too late?"""


class Leader:
    """`start_standby` starts the agent that takes over from this one; `hire` has the worker processes."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        place: Rendezvous,
        lead: Lead,
        journal: Journal,
        start_standby: Callable[[], subprocess.Popen[bytes]],
        hire: type[Crew] = Crew,
    ) -> None:
        self._job, self._folder, self._place = job, folder, place
        self._store, self._fence, self._kept, self._journal = lead.store, lead.fence, lead.kept, journal
        board = lead.kept.get(BOARD)
        assert board is not None
        self._board = Board(os.dup(board[0]), board[1])
        self._selector = selectors.DefaultSelector()
        segments = Segments(job.settings.shm_limit, lead.kept)
        self._coordinator = Coordinator(job, folder, lead, journal, self._board, segments)
        self._answering = Answering(self._coordinator, folder, self._board, lead.kept, segments)
        self._crew = hire(folder, self._board, self._selector, self._start_nursery, self._on_start, self._on_end)
        address = f"{place.address}-{lead.fence}"
        self._desk = Desk(address, place.secret, self._selector, self._answering.answer, self._answering.known)
        self._answering.desk = self._desk
        self._coordinator.start, self._coordinator.kill = self._start_worker, self._crew.kill
        self._coordinator.changed = self._answering.changed
        self._start_standby = start_standby
        self._standby: subprocess.Popen[bytes] | None = None
        self._standby_at = 0.0
        self._told_wait, self._quiet_s = 0.0, QUIET_S
        self._ended_at: dict[int, float] = {}
        self._looked_at = 0.0
        self._signalled = False
        plan = Injection.of(job.faults, journal.faults)
        self._injection = Injection(plan, folder, self._crew, self._board, self._desk, self._standby_pid)

    def lead(self) -> int | None:
        """Until the run ends (its exit code), or another agent leads (None)."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            self._begin()
            while self._journal.running:
                self._turn()
            return self._end()
        except NurseryError as error:
            self._coordinator.fail("the run:", str(error), self._log_tail("nursery"))
            self._crew.kill_all()
            return self._end()
        except FencedError as error:
            self._folder.event("stepped down", str(error), fence=self._fence)
            return None
        finally:
            signal.signal(signal.SIGTERM, before)
            self._close()

    def _begin(self) -> None:
        """Take over what is there, and start what should be."""
        self._coordinator.save()
        self._kept.on_keep, self._kept.on_release = self._answering.share, self._answering.unshare
        self._board.leader = self._fence
        self._board.beat()
        if self._fence == 1:
            self._folder.event("launched", self._job.words, workers=self._job.workers)
        else:
            self._take_over()
        self._coordinator.announce()
        for number in self._journal.running:
            if number in self._journal.pids:
                self._crew.adopt(number, self._journal.pids[number], self._kept.take(_pidfd_name(number)))
            else:
                self._start_worker(number)
        self._run_standby(time.monotonic())

    def _take_over(self) -> None:
        self._folder.event(
            "leading",
            "the agent that led before is gone or frozen",
            fence=self._fence,
            pid=os.getpid(),
            notice="the coordinator is gone: the standby leads now",
        )
        try:
            nursery = Nursery.connect(self._nursery_address, self._place.secret)
            nursery.ask_for_children()  # whose end the last leader may have been told alone
            self._crew.use(nursery)
        except OSError:
            self._folder.event("nursery lost", "it went with the agent that led before; another one starts when needed")
        self._coordinator.take_over()

    def _turn(self) -> None:
        # A plan of faults wants to be met to the step.
        tick_s = _TICK_S if self._injection.plan.over else _TICK_S / 10
        for key, _ in self._selector.select(tick_s):
            # An earlier event of this batch may have been the end of this one.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)
        if self._board.leader != self._fence:
            raise FencedError(f"fence {self._board.leader} leads the run; {self._fence} is over")
        self._board.beat()
        now = time.monotonic()
        self._crew.tick(now)
        for words in self._desk.tick(now):
            self._folder.event("refused", words)
        if now - self._looked_at >= tick_s:
            self._looked_at = now
            self._look_around(now)

    def _look_around(self, now: float) -> None:
        """At every worker: with many of them too dear to be done whenever one of them says something."""
        rows = self._rows()
        self._tell_waits(rows, now)
        self._check_odd_exits(rows, now)
        self._see_frozen(now)
        self._coordinator.leavers()
        self._send_newcomers_home()
        self._run_standby(now)
        self._inject(rows, now - self._journal.started)
        if self._signalled and not self._journal.stop:
            self._coordinator.stop(Stop.SIGTERM, "the agent was told to end (SIGTERM)")
        if self._journal.failure is not None and now - self._journal.failure.at > _GRACE_S:
            self._crew.kill_all()

    def _rows(self) -> list[Seen]:
        """The members' rows, main's first."""
        return [self._board.see(number) for number in self._journal.membership.settled.members]

    def _on_signal(self, signum: int, frame: object) -> None:
        self._signalled = True

    # the end

    def _end(self) -> int:
        """When the terminal hears of it, nothing of the run is left but this process."""
        code = conclude(self._job, self._folder, self._journal, self._board)
        self._store.remove(self._fence)
        Rendezvous.remove(self._folder)
        for peer in self._desk.shadows:
            peer.send(messages.Ended(code))
        self._crew.close(quit_nursery=True)
        if self._standby is not None:
            try:
                self._standby.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._standby.kill()
                self._standby.wait()
        for peer in self._desk.watchers:
            peer.send(messages.Ended(code))
        return code

    def _close(self) -> None:
        self._crew.close(quit_nursery=False)
        self._desk.close()
        self._selector.close()
        self._board.close()
        self._kept.close()

    def _log_tail(self, name: str) -> str:
        path = self._folder.logs / f"{name}.log"
        return path.read_text(errors="replace")[-4000:].rstrip() if path.exists() else ""

    # workers

    @property
    def _nursery_address(self) -> str:
        return f"{self._place.address}-nursery"

    def _start_nursery(self) -> Nursery:
        environment = nursery_environment(os.environ, self._job.settings.threads)
        return Nursery.start(environment, self._folder.logs / "nursery.log", self._nursery_address, self._place.secret)

    def _start_worker(self, number: int) -> None:
        job, place = self._job, self._place
        ticket = Ticket(
            number,
            place.address,
            self._fence,
            place.secret.hex(),
            str(self._folder.path.absolute()),
            job.flags,
            job.dry_run,
            job.resume,
        )
        environment = own_environment(ticket, self._journal.places[number], job.gpus, job.settings.share_gpus)
        target = ["-m", job.target] if job.as_module else [job.target]
        self._board.row(number).enter(Phase.STARTING)
        log = self._folder.log_of("worker", number)
        self._crew.start(Fork(number, environment, str(log), bool(job.resume), [*target, *job.arguments]))

    def _on_start(self, worker: Worker) -> None:
        self._kept.keep(_pidfd_name(worker.number), os.dup(worker.pidfd))
        self._coordinator.worker_started(worker.number, worker.pid)

    def _on_end(self, number: int, code: int) -> None:
        """A worker has ended; what it said before comes first."""
        self._desk.hear_worker(number)
        self._kept.release(_pidfd_name(number))
        self._ended_at[number] = time.monotonic()
        self._coordinator.worker_ended(number, code)

    def _see_frozen(self, now: float) -> None:
        """A worker that is stopped for longer than its lease is evicted: killed, so that it cannot come back."""
        lease = self._job.settings.lease
        for worker in self._crew.frozen(now, lease):
            words = f"was frozen for {lease:g} s"
            self._folder.event("evicted", f"it {words}", worker=worker.number)
            if _NO_KILL in os.environ:
                self._coordinator.lose(worker.number, words)
            else:
                self._crew.kill(worker.number)

    def _send_newcomers_home(self) -> None:
        """The members have finished: whoever is still on the way comes too late."""
        exits = self._journal.exits
        if all(number in exits for number in self._journal.membership.settled.members):
            self._journal.membership.starts_left = 0  # nobody comes in their place
            self._crew.kill_all()

    def _check_odd_exits(self, rows: list[Seen], now: float) -> None:
        """A worker that left with 0 while others still train has skipped the end of the script."""
        if self._journal.failure is not None:
            return
        for number, phase in [(row.worker, row.phase) for row in rows]:
            odd = self._journal.exits.get(number) == 0 and phase not in (Phase.FINISHED, Phase.LEFT)
            if odd and now - self._ended_at.get(number, now) > _ODD_EXIT_S:
                text = (
                    "ended without paceline.init()"
                    if phase == Phase.STARTING
                    else "left the script early, with exit code 0"
                )
                self._coordinator.fail(f"worker {number}", f"{text}, while others wait for it", "", 1, number)
                return

    def _tell_waits(self, rows: list[Seen], now: float) -> None:
        if self._journal.failure is not None:
            return
        found = verdict(rows)
        if found is None:
            self._quiet_s = QUIET_S
        elif now - self._told_wait >= self._quiet_s:
            # Told at once, then ever more seldom: a long first batch should not fill the screen.
            self._told_wait, self._quiet_s = now, min(self._quiet_s * 2, 60.0)
            worker, words = found
            phase = self._board.see(worker).phase
            self._folder.event("starting" if phase == Phase.STARTING else "waiting", words, worker=worker, notice=words)
            if phase not in (Phase.STARTING, Phase.FINISHED, Phase.FAILED):
                # faulthandler writes every thread's stack into the worker's log.
                self._crew.signal(worker, signal.SIGUSR1)

    # faults and the standby

    def _inject(self, rows: list[Seen], seconds: float) -> None:
        plan = self._injection.plan
        actions = (
            plan.due(max(row.step for row in rows), seconds, [row.worker for row in rows]) if not plan.over else []
        )
        if actions:
            self._journal.faults = plan.state()
            self._coordinator.save()  # first: the next leader must not be hit by the same fault
            self._injection.carry_out(actions)

    def _standby_pid(self) -> int:
        return self._standby.pid if self._standby is not None and self._standby.poll() is None else 0

    def _run_standby(self, now: float) -> None:
        """There is one at any time: if it dies, another one starts."""
        if self._job.dry_run or (self._standby is not None and self._standby.poll() is None):
            return
        if now - self._standby_at >= _STANDBY_EVERY_S:
            self._standby_at, self._standby = now, self._start_standby()


def _pidfd_name(worker: int) -> str:
    return f"worker/{worker}"
