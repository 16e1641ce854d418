"""The agent that leads: it starts and watches the workers, answers them, and says who is in the run.

It is not on the path of a step. `membership` decides, the store is told before anybody else, and this
loop carries it out. If it dies or freezes, the standby goes on from the store under the next fence; if
it thaws, it finds itself fenced and steps down. No torch in here.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.cluster import messages
from paceline.cluster.board import Abort, Board, Phase, Seen, Stop
from paceline.cluster.connection import Connection
from paceline.cluster.crew import Crew, NurseryError, Worker
from paceline.cluster.desk import Desk, Key
from paceline.cluster.injection import Injection
from paceline.cluster.job import Job
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.ledger import Failure, Ledger
from paceline.cluster.membership import GiveUp, Instruction, Kill, Publish, Standing, Start, View
from paceline.cluster.memory import Segments
from paceline.cluster.nursing import Fork, Nursery
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import FencedError, Store
from paceline.launch.environment import Ticket, nursery_environment, own_environment
from paceline.watch.folder import RunFolder
from paceline.watch.verdict import QUIET_S, verdict

_TICK_S = 0.1
_GRACE_S = 1.5
"""After a failure the others get this long to notice and leave by themselves; then they are killed."""
_ODD_EXIT_S = 1.0
_KILLS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Signals that come from outside: the worker was well. A crash (SIGSEGV, …) would only repeat itself."""
_STANDBY_EVERY_S = 1.0
REPLACEMENTS = 100
"""How many workers a run may start anew before it makes do with those it has."""


class Leader:
    """`start_standby` starts the agent that takes over from this one."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        place: Rendezvous,
        store: Store,
        fence: int,
        kept: Kept,
        ledger: Ledger,
        start_standby: Callable[[], subprocess.Popen[bytes]],
    ) -> None:
        self._job, self._folder, self._place = job, folder, place
        self._store, self._fence, self._kept, self._ledger = store, fence, kept, ledger
        self._membership = ledger.membership
        board = kept.get(BOARD)
        assert board is not None
        self._board = Board(os.dup(board[0]), board[1])
        self._segments = Segments(job.settings.shm_limit, kept)
        self._selector = selectors.DefaultSelector()
        self._crew = Crew(folder, self._board, self._selector, self._start_nursery, self._on_start, self._on_end)
        address = f"{place.address}-{fence}"
        self._desk = Desk(address, place.secret, self._selector, self._answer, self._known)
        self._start_standby = start_standby
        self._standby: subprocess.Popen[bytes] | None = None
        self._standby_at = 0.0
        self._told_wait, self._quiet_s = 0.0, QUIET_S
        self._ended_at: dict[int, float] = {}
        self._signalled = 0
        plan = Injection.of(job.faults, ledger.faults)
        self._injection = Injection(plan, folder, self._crew, self._board, self._desk, self._standby_pid)
        self._told_members = ledger.membership.settled.members

    # life

    def lead(self) -> int | None:
        """Until the run ends (its exit code), or another agent leads (None)."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            self._begin()
            while self._ledger.running:
                self._turn()
            return self._end()
        except NurseryError as error:
            self._fail("the run:", f"{error}", self._log_tail("nursery"), 1, -1)
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
        self._save()
        self._kept.on_keep, self._kept.on_release = self._share_kept, self._unshare_kept
        self._board.leader = self._fence
        self._board.beat()
        self._board.reach = self._membership.reach
        if self._fence == 1:
            self._folder.event("launched", self._job.words, workers=self._job.workers)
        else:
            self._take_over()
        for number in self._ledger.running:
            pidfd = self._kept.take(_pidfd_name(number))
            if pidfd is not None:
                self._crew.adopt(number, self._ledger.pids[number], pidfd)
            else:
                self._start_worker(number)
        self._run_standby(time.monotonic())

    def _take_over(self) -> None:
        membership = self._membership
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
        # Whatever the last leader had decided and not yet done is done now; all of it can be done twice.
        for number, standing in membership.standing.items():
            if standing is Standing.GONE:
                self._board.bury(number)
        self._board.next_term = membership.pending.term if membership.pending else 0
        self._board.stop = self._ledger.stop
        if self._ledger.failure is not None:
            self._board.abort = Abort.WORKER_LOST

    def _turn(self) -> None:
        # A plan of faults wants to be met to the step.
        for key, _ in self._selector.select(_TICK_S if self._injection.plan.over else _TICK_S / 10):
            key.data(key.fileobj)
        if self._board.leader != self._fence:
            raise FencedError(f"fence {self._board.leader} leads the run; {self._fence} is over")
        self._board.beat()
        self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        self._crew.tick(now)
        for words in self._desk.tick(now):
            self._folder.event("refused", words)
        rows = self._rows()
        self._tell_waits(rows, now)
        self._check_odd_exits(now)
        self._see_frozen(now)
        self._see_leavers()
        self._send_newcomers_home()
        self._run_standby(now)
        self._inject(rows, now - self._ledger.started)
        if self._signalled and not self._ledger.stop:
            self._stop(Stop.SIGTERM, "the agent was told to end (SIGTERM)")
        if self._ledger.failure is not None and now - self._ledger.failure.at > _GRACE_S:
            self._crew.kill_all()

    def _close(self) -> None:
        self._crew.close(quit_nursery=False)
        self._desk.close()
        self._selector.close()
        self._board.close()
        self._kept.close()

    def _save(self, views: list[View] | None = None) -> None:
        self._store.write(self._fence, self._ledger.encode(), views or [])

    def _inject(self, rows: list[Seen], seconds: float) -> None:
        plan = self._injection.plan
        actions = (
            plan.due(max(row.step for row in rows), seconds, [row.worker for row in rows]) if not plan.over else []
        )
        if actions:
            self._ledger.faults = plan.state()
            self._save()  # first: the next leader must not be hit by the same fault
            self._injection.carry_out(actions)

    def _standby_pid(self) -> int:
        return self._standby.pid if self._standby is not None and self._standby.poll() is None else 0

    def _rows(self) -> list[Seen]:
        """The members' rows, main's first."""
        return [self._board.see(number) for number in self._membership.settled.members]

    # the end

    def _end(self) -> int:
        code = self._exit_code()
        self._folder.event("ended", self._folder.read_json(self._folder.summary).get("exit", ""), exit_code=code)
        self._store.remove()
        Rendezvous.remove(self._folder)
        self._leave_nobody(code)
        for peer in self._desk.watchers:
            peer.send(messages.Ended(code))
        return code

    def _leave_nobody(self, code: int) -> None:
        """When the terminal hears of the end, nothing of the run is left but this process."""
        for peer in self._desk.shadows:
            peer.send(messages.Ended(code))
        self._crew.close(quit_nursery=True)
        if self._standby is not None:
            try:
                self._standby.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._standby.kill()
                self._standby.wait()

    def _exit_code(self) -> int:
        ledger, summary = self._ledger, self._folder.read_json(self._folder.summary)
        if ledger.failure is not None:
            return self._end_failed(ledger.failure)
        if self._job.dry_run:
            return 0
        if ledger.killed or not (summary or all(row.phase == Phase.FINISHED for row in self._rows())):
            why = ledger.killed or "no worker trained anything"
            self._write_failed_summary(why)
            if not {"-h", "--help"} & set(self._job.arguments):
                self._folder.event("over", why, notice=why)
            return 130 if ledger.killed else 0
        return ledger.stop.exit_code

    def _end_failed(self, failure: Failure) -> int:
        of_worker = failure.worker >= 0 and failure.exit_code != 2
        log = str(self._folder.log_of("worker", failure.worker)) if of_worker else ""
        self._folder.event(
            "failed",
            f"{failure.who} {failure.text}",
            worker=failure.worker,
            exit_code=failure.exit_code,
            who=failure.who,
            text=failure.text,
            trace=failure.trace,
            log=log,
        )
        self._write_failed_summary(f"failed: {failure.who} {failure.text}".splitlines()[0])
        return failure.exit_code

    def _write_failed_summary(self, why: str) -> None:
        rows = [self._board.see(number) for number in self._ledger.places]
        known = {
            "run": self._folder.id,
            "exit": why,
            "steps": max(row.step for row in rows),
            "samples": max(row.samples for row in rows),
            "workers": self._job.workers,
            "strategy": self._job.settings.strategy,
            "wall_s": round(time.monotonic() - self._ledger.started, 3),
        }
        self._folder.write_json(self._folder.summary, known)

    def _fail(self, who: str, text: str, trace: str, exit_code: int, worker: int) -> None:
        if self._ledger.failure is None and not self._ledger.killed:
            self._ledger.failure = Failure(who, text, trace, exit_code, worker, time.monotonic())
            self._save()
            self._board.abort = Abort.WORKER_LOST

    def _stop(self, who: Stop, why: str, kill: bool = False) -> None:
        """After this step, or at once."""
        self._ledger.stop = self._ledger.stop or who
        if kill:
            self._ledger.killed = why
        self._save()
        self._folder.event("stop asked for", why)
        self._board.stop = self._ledger.stop
        if kill:
            self._board.abort = Abort.STOPPING
            self._crew.kill_all()

    def _log_tail(self, name: str) -> str:
        path = self._folder.logs / f"{name}.log"
        return path.read_text(errors="replace")[-4000:].rstrip() if path.exists() else ""

    def _on_signal(self, signum: int, frame: object) -> None:
        self._signalled = signum

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
        environment = own_environment(ticket, self._ledger.places[number], job.gpus, job.settings.share_gpus)
        target = ["-m", job.target] if job.as_module else [job.target]
        self._board.row(number).enter(Phase.STARTING)
        log = self._folder.log_of("worker", number)
        self._crew.start(Fork(number, environment, str(log), bool(job.resume), [*target, *job.arguments]))

    def _on_start(self, worker: Worker) -> None:
        number, place = worker.number, self._ledger.places[worker.number]
        self._kept.keep(_pidfd_name(number), os.dup(worker.pidfd))
        if self._ledger.pids.get(number) == worker.pid:
            return  # adopted
        self._ledger.pids[number] = worker.pid
        self._save()
        why = f"it stands for worker {place}" if place != number else "the run begins"
        why = "a spare, for whoever is lost" if place == number >= self._job.workers else why
        self._folder.event("worker started", why, worker=number, pid=worker.pid)

    def _on_end(self, number: int, code: int) -> None:
        """A worker has ended; what it said before comes first."""
        self._desk.hear_worker(number)
        self._ledger.exits[number], self._ended_at[number] = code, time.monotonic()
        self._kept.release(_pidfd_name(number))
        self._save()
        self._folder.event("worker ended", _exit_words(code), worker=number, exit_code=code)
        if self._membership.standing[number] is Standing.GONE:
            self._board.bury(number)  # whoever met it in a view that was overtaken must not wait for it
            return
        sent_home = self._members_have_ended and number not in self._membership.settled.members
        if self._ledger.failure is not None or self._ledger.killed or sent_home:
            return
        if code == 0 and self._board.see(number).phase == Phase.LEFT:
            self._follow_up(self._membership.left(number))
        elif code and not self._survives(number, code):
            trace = _crash_trace(self._folder.log_of("worker", number)) if code < 0 else ""
            self._fail(f"worker {number}", _exit_words(code), trace, 1 if code < 0 else code, number)

    def _survives(self, number: int, code: int) -> bool:
        """Whether the run goes on without this worker, which has just ended."""
        a_newcomer = number not in self._membership.settled.members
        if not (a_newcomer and code < 0) and (code not in _KILLS or not self._can_go_on):
            return False
        if self._board.see(number).phase == Phase.FINISHED:
            return True
        self._ledger.deaths += 1
        self._follow_up(self._membership.died(number, _exit_words(code)), buried=number)
        return self._ledger.failure is None

    @property
    def _can_go_on(self) -> bool:
        return self._job.survives_deaths and self._job.workers > 1

    def _see_frozen(self, now: float) -> None:
        """A worker that is stopped for longer than its lease is evicted: killed, so that it cannot come back."""
        lease = self._job.settings.lease
        for worker in self._crew.frozen(now, lease):
            self._folder.event("evicted", f"it was frozen for {lease:g} s", worker=worker.number)
            self._crew.kill(worker.number)

    def _see_leavers(self) -> None:
        """Workers that were told to go (SIGTERM) leave at a step's end; if all are, the run stops."""
        for number in self._membership.settled.members:
            if self._board.leaves(number) and self._membership.standing[number] is Standing.MEMBER:
                self._folder.event("leaving", "it was told to end (SIGTERM)", worker=number)
                self._follow_up(self._membership.leave(number))
        if self._membership.all_leave and not self._ledger.stop:
            self._stop(Stop.SIGTERM, "every worker was told to end (SIGTERM)")

    def _send_newcomers_home(self) -> None:
        """The members have finished: whoever is still on the way comes too late."""
        if self._members_have_ended:
            self._crew.kill_all()

    @property
    def _members_have_ended(self) -> bool:
        return all(number in self._ledger.exits for number in self._membership.settled.members)

    def _check_odd_exits(self, now: float) -> None:
        """A worker that left with 0 while others still train has skipped the end of the script."""
        if self._ledger.failure is not None:
            return
        for number in self._membership.settled.members:
            phase = self._board.see(number).phase
            odd = self._ledger.exits.get(number) == 0 and phase not in (Phase.FINISHED, Phase.LEFT)
            if odd and now - self._ended_at.get(number, now) > _ODD_EXIT_S:
                text = (
                    "ended without paceline.init()"
                    if phase == Phase.STARTING
                    else "left the script early, with exit code 0"
                )
                self._fail(f"worker {number}", f"{text}, while others wait for it", "", 1, number)
                return

    def _tell_waits(self, rows: list[Seen], now: float) -> None:
        if self._ledger.failure is not None:
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

    # who is in the run

    def _follow_up(self, instructions: list[Instruction], buried: int | None = None) -> None:
        """Written down first; then told and done."""
        self._save(self._ledger.enter(instructions))
        self._board.reach = self._membership.reach
        if buried is not None:
            self._board.bury(buried)
        for instruction in instructions:
            match instruction:
                case Publish(view, agreed, why):
                    self._publish(view, agreed, why)
                case Start(number, why):
                    self._folder.event("starting a worker", why, worker=number)
                    self._start_worker(number)
                case Kill(number, why):
                    self._folder.event("ending a worker", why, worker=number)
                    self._crew.kill(number)
                case GiveUp(why):
                    self._fail("the run:", why, "", 1, max(self._ledger.places))
        self._desk.settle()
        self._tell_members()

    def _publish(self, view: View, agreed: bool, why: str) -> None:
        count = len(view.members)
        notice = {} if agreed else {"notice": f"{why}; going on with {count} worker{'s' * (count != 1)}"}
        self._folder.event("view", why, term=view.term, workers=list(view.members), **notice)
        self._board.next_term = view.term if agreed else 0
        if not agreed:
            self._segments.forget(lambda name: _term_of(name) < view.term - 1)

    def _tell_members(self) -> None:
        members = self._membership.settled.members
        if members != self._told_members:
            self._told_members = members
            for peer in self._desk.watchers:
                peer.send(messages.Members(list(members)))

    # messages

    def _answer(self, peer: Connection, message: msgspec.Struct) -> None:
        worker = self._desk.worker_of[peer]
        match message:
            case messages.Hello() if self._desk.is_cut(message.worker):
                raise ValueError(f"worker {message.worker} is cut off")
            case messages.Hello():
                self._desk.worker_of[peer] = message.worker
                self._welcome(peer)
            case messages.Watch():
                self._desk.watchers.append(peer)
                self._welcome(peer)
            case messages.Shadow():
                self._desk.shadows.append(peer)
                self._welcome(peer)
                for name in self._kept.names():
                    self._send_kept(peer, name)
                self._folder.event("standby", "it can take over", pid=self._standby_pid(), leader=os.getpid())
            case messages.Steer():
                peer.send(messages.Done())
            case messages.Stop(who, kill):
                self._stop(who, _kill_words(who) if kill else who.words, kill)
                peer.send(messages.Done())
            case messages.Scale(count):
                peer.send(self._scale(count))
            case _ if worker >= 0:
                self._answer_worker(peer, worker, message)
            case _:
                raise ValueError(f"nobody says {type(message).__name__} before a greeting")

    def _answer_worker(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        match message:
            case messages.After(term):
                self._desk.wait(peer, ("after", term))
            case messages.Get(key):
                self._desk.wait(peer, ("fact", key))
            case messages.Ready():
                self._follow_up(self._membership.ready(worker))
                self._desk.wait(peer, ("join", worker))
            case messages.Entering(term):
                view = self._ledger.views.get(term)
                peer.send(self._next(view) if view else messages.Refused(f"there is no term {term}"))
            case messages.Healed():
                instructions = self._membership.healed(worker)
                self._board.next_term = 0
                self._segments.forget(lambda name: name.startswith("state-"))
                words = f"worker {worker} has joined"
                self._folder.event("joined", "it has the run's state", worker=worker, notice=words)
                self._follow_up(instructions)
                peer.send(messages.Done())
            case messages.Segment(name, size):
                answer, fd = self._segments.grant(name, size, self._job.workers)
                peer.send(answer, (fd,) if fd is not None else ())
            case messages.Put(key, value):
                self._ledger.facts[key] = value
                self._save()
                peer.send(messages.Done())
                self._desk.settle()
            case messages.Failed():
                if not message.follows:
                    self._fail(f"worker {worker}:", message.summary, message.traceback, message.exit_code, worker)
                peer.send(messages.Done())
            case _:
                raise ValueError(f"a worker does not say {type(message).__name__}")

    def _welcome(self, peer: Connection) -> None:
        view = self._membership.settled
        peer.send(
            messages.Welcome(self._board.workers, view.term, list(view.members), self._ledger.deaths), (self._board.fd,)
        )

    def _next(self, view: View) -> messages.Next:
        return messages.Next(view.term, list(view.members), self._ledger.deaths)

    def _known(self, key: Key) -> msgspec.Struct | None:
        """The answer to a question, once there is one."""
        ledger = self._ledger
        match key:
            case ("after", int(term)) if term in ledger.after:
                return self._next(ledger.after[term])
            case ("fact", str(name)) if name in ledger.facts:
                return messages.Value(ledger.facts[name])
            case ("join", int(worker)):
                pending = self._membership.pending
                return self._next(pending) if pending and worker in pending.members else None
        return None

    def _scale(self, count: int) -> messages.Done | messages.Refused:
        slots = self._slots()
        if not 1 <= count <= slots:
            return messages.Refused(f"{count} workers for {slots} slots: a run trains with 1 to {slots} workers")
        if not self._can_go_on and self._job.workers != count:
            return messages.Refused("this run cannot change its workers: it uses groups of torch, or has one worker")
        self._folder.event("scaling", f"{count} workers were asked for", notice=f"going to {count} workers")
        self._follow_up(self._membership.scale(count))
        return messages.Done()

    def _slots(self) -> int:
        """The script's init() may have set them."""
        settings = self._folder.read_json(self._folder.config).get("settings", {})
        return int(settings.get("slots", self._job.settings.slots))

    # the standby

    def _run_standby(self, now: float) -> None:
        """There is one at any time: if it dies, another one starts."""
        if self._job.dry_run or (self._standby is not None and self._standby.poll() is None):
            return
        if now - self._standby_at >= _STANDBY_EVERY_S:
            self._standby_at, self._standby = now, self._start_standby()

    def _share_kept(self, name: str, fd: int, size: int) -> None:
        for peer in self._desk.shadows:
            self._send_kept(peer, name)

    def _send_kept(self, peer: Connection, name: str) -> None:
        found = self._kept.get(name)
        if found is not None:
            peer.send(messages.Keep(name, found[1]), (found[0],))

    def _unshare_kept(self, name: str) -> None:
        for peer in self._desk.shadows:
            peer.send(messages.Release(name))


def _kill_words(who: Stop) -> str:
    return "killed by a second Ctrl-C" if who is Stop.CTRL_C else "killed by `paceline stop --kill`"


def _pidfd_name(worker: int) -> str:
    return f"worker/{worker}"


def _term_of(segment: str) -> int:
    """The term whose group asked for this segment: group-3/memory-1, state-4."""
    return int(segment.split("/")[0].split("-")[1])


def _exit_words(code: int) -> str:
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
