"""The agent: one process per machine that starts, watches and ends that machine's workers.

It is not on the path of a step. A worker's death is seen through its pidfd at once: a kill is answered
by a view of those who remain and by a replacement (`membership` decides), a failure of the script ends
the run, by way of the abort word that every waiting loop watches. No torch in here.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster import messages, wire
from paceline.cluster.board import Abort, Board, Phase, Seen
from paceline.cluster.membership import GiveUp, Instruction, Kill, Membership, Publish, Start, View
from paceline.cluster.memory import Segments
from paceline.faults.plan import Fault
from paceline.launch.environment import Ticket, worker_environment
from paceline.settings import Settings
from paceline.watch.folder import RunFolder
from paceline.watch.lines import Fold, Follower
from paceline.watch.terminal import Terminal
from paceline.watch.verdict import QUIET_S, verdict

_TICK_S = 0.05
_GRACE_S = 1.5
"""After a failure the others get this long to notice and leave by themselves; then they are killed."""
_ODD_EXIT_S = 1.0
_REPLACEMENTS = 100
"""How many workers a run may start anew before it makes do with those it has."""
_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that come from outside: the worker was well. A crash (SIGSEGV, …) would only repeat itself."""


@dataclass(frozen=True)
class Job:
    """What to run: the target and its arguments, as the user typed them."""

    target: str
    arguments: tuple[str, ...]
    as_module: bool
    flags: dict[str, Any]
    settings: Settings
    show: str = "main"
    dry_run: bool = False
    gpus: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    """What is to go wrong on purpose."""
    resume: str = ""
    """The checkpoint to go on from."""


@dataclass
class Worker:
    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    follower: Follower
    place: int
    """Which of the first workers it stands for: whose GPU it has."""
    exit_code: int | None = None
    exited_at: float = 0.0


@dataclass
class Failure:
    who: str
    text: str
    trace: str
    exit_code: int
    worker: int
    at: float = field(default_factory=time.monotonic)


class Agent:
    def __init__(self, job: Job, folder: RunFolder, terminal: Terminal) -> None:
        self._job, self._folder, self._terminal = job, folder, terminal
        self._count = 1 if job.dry_run else job.settings.workers
        self._secret = secrets.token_bytes(wire.SECRET_BYTES)
        self._address = f"paceline-{folder.id}-{secrets.token_hex(8)}"
        self._membership = Membership(self._count, 0 if job.dry_run else _REPLACEMENTS)
        self._rows_made = self._count + self._membership.spare_starts
        self._board = Board.create(self._rows_made)
        self._views: dict[int, View] = {1: self._membership.settled}
        self._after: dict[int, View] = {}
        """For each term, the view that followed the first death in it."""
        self._deaths = 0
        self._faults = list(job.faults)
        self._segments = Segments(job.settings.shm_limit)
        self._facts: dict[str, str] = {}
        self._asking: list[tuple[socket.socket, str]] = []
        self._asking_after: list[tuple[socket.socket, int]] = []
        self._ready: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._worker_of: dict[socket.socket, int] = {}
        self._workers: list[Worker] = []
        self._failure: Failure | None = None
        self._interrupts = 0
        self._killed = False
        self._fold = Fold()
        self._told_wait, self._quiet_s = 0.0, QUIET_S
        self._started = time.monotonic()

    # life

    def run(self) -> int:
        """Start the workers, watch them to the end; the exit code of the run."""
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        server = wire.listen(self._address)
        self._selector.register(server, selectors.EVENT_READ, self._on_connect)
        try:
            self._start()
            while any(worker.exit_code is None for worker in self._workers):
                for key, _ in self._selector.select(_TICK_S):
                    key.data(key.fileobj)
                self._tick()
            return self._end()
        finally:
            self._kill_all()
            self._terminal.close()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            self._segments.close()
            self._board.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _start(self) -> None:
        job = self._job
        self._folder.event("launched", " ".join(["paceline run", job.target, *job.arguments]), workers=self._count)
        for number in range(self._count):
            self._start_worker(number, number)

    def _start_worker(self, number: int, place: int) -> None:
        job = self._job
        target = ["-m", job.target] if job.as_module else [job.target]
        command = [sys.executable, "-m", "paceline.launch.boot", *target, *job.arguments]
        ticket = Ticket(
            number,
            self._address,
            self._secret.hex(),
            str(self._folder.path.absolute()),
            job.flags,
            job.dry_run,
            job.resume,
        )
        gpus = list(job.gpus) if job.gpus else None
        env = worker_environment(os.environ, ticket, place, job.settings.threads, gpus, job.settings.share_gpus)
        path = self._folder.log_of("worker", number)
        # The worker writes its file itself: no pipe through the agent that could break or fill.
        with open(path, "ab" if job.resume else "wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        worker = Worker(number, process, os.pidfd_open(process.pid), Follower(path), place)
        self._workers.append(worker)
        self._board.row(number).enter(Phase.STARTING)
        self._folder.event(
            "worker started",
            f"it stands for worker {place}" if place != number else "the run begins",
            worker=number,
            pid=process.pid,
        )
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda _, w=worker: self._on_exit(w))

    def _end(self) -> int:
        if self._failure is not None:
            return self._end_failed(self._failure)
        self._follow(last=True)
        summary = self._folder.read_json(self._folder.summary)
        if self._job.dry_run:
            return 0
        if self._killed or not (summary or all(row.phase == Phase.FINISHED for row in self._rows())):
            why = "killed by a second Ctrl-C" if self._killed else "no worker trained anything"
            self._write_failed_summary(why)
            if not {"-h", "--help"} & set(self._job.arguments):
                self._terminal.notice(why)
            return 130 if self._killed else 0
        if self._job.show != "none":
            self._terminal.table(summary, str(self._folder.path))
        return 130 if self._interrupts else 0

    def _end_failed(self, failure: Failure) -> int:
        self._folder.event(
            "failed", f"{failure.who} {failure.text}", worker=failure.worker, exit_code=failure.exit_code
        )
        self._write_failed_summary(f"failed: {failure.who} {failure.text}".splitlines()[0])
        log = "" if failure.exit_code == 2 else str(self._folder.log_of("worker", failure.worker))
        self._terminal.failure(failure.who, failure.text, failure.trace, log)
        return failure.exit_code

    def _write_failed_summary(self, why: str) -> None:
        rows = [self._board.see(worker.number) for worker in self._workers]
        known = {
            "run": self._folder.id,
            "exit": why,
            "steps": max(row.step for row in rows),
            "samples": max(row.samples for row in rows),
            "workers": self._count,
            "strategy": self._job.settings.strategy,
            "wall_s": round(time.monotonic() - self._started, 3),
        }
        self._folder.write_json(self._folder.summary, known)

    # what happens

    def _tick(self) -> None:
        now = time.monotonic()
        self._follow()
        rows = self._rows()
        self._terminal.progress(rows)
        self._tell_waits(rows, now)
        self._check_odd_exits(now)
        self._send_newcomers_home()
        self._inject(rows, now - self._started)
        if self._failure is not None and now - self._failure.at > _GRACE_S:
            self._kill_all()

    def _rows(self) -> list[Seen]:
        """The members' rows, main's first."""
        return [self._board.see(number) for number in self._membership.settled.members]

    def _follow(self, last: bool = False) -> None:
        if self._failure is not None:
            return
        show_all, now = self._job.show == "all", time.monotonic()
        for worker in self._workers:
            if self._job.show == "none" or not (show_all or worker.number == self._membership.settled.members[0]):
                continue
            for line in worker.follower.read(last):
                if show_all and not line.endswith("\r"):
                    self._fold.add(worker.number, line, now)
                else:
                    self._terminal.output(str(worker.number), line)
        for who, text in self._fold.due(now, all=last):
            self._terminal.output(who, text)

    def _tell_waits(self, rows: list[Seen], now: float) -> None:
        if self._failure is not None:
            return
        found = verdict(rows)
        if found is None:
            self._quiet_s = QUIET_S
        elif now - self._told_wait >= self._quiet_s:
            # Told at once, then ever more seldom: a long first batch should not fill the screen.
            self._told_wait, self._quiet_s = now, min(self._quiet_s * 2, 60.0)
            worker, words = found
            self._terminal.notice(words)
            self._folder.event("waiting", words, worker=worker)
            if self._board.see(worker).phase not in (Phase.STARTING, Phase.FINISHED, Phase.FAILED):
                # faulthandler writes every thread's stack into the worker's log.
                signal.pidfd_send_signal(self._workers[worker].pidfd, signal.SIGUSR1)

    def _on_exit(self, worker: Worker) -> None:
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        self._kill(worker)  # its loader processes: until it is reaped, the group is its own
        worker.exit_code, worker.exited_at = worker.process.wait(), time.monotonic()
        code = worker.exit_code
        self._drain(worker.number)
        self._folder.event("worker ended", _exit_words(code), worker=worker.number, exit_code=code)
        if code and self._failure is None and not self._killed and not self._survives(worker):
            tail = _crash_trace(worker.follower.path) if code < 0 else ""
            self._fail(
                Failure(f"worker {worker.number}", _exit_words(code), tail, 1 if code < 0 else code, worker.number)
            )

    # who is in the run

    def _survives(self, worker: Worker) -> bool:
        """Whether the run goes on without this worker, which has just ended."""
        code = worker.exit_code
        assert code is not None
        if worker.number not in self._membership.settled.members and code < 0:
            pass  # a newcomer that never came
        elif code not in [-number for number in _KILLS] or not self._can_go_on():
            return False
        if self._board.see(worker.number).phase == Phase.FINISHED:
            return True
        self._board.bury(worker.number)
        self._deaths += 1
        self._follow_up(self._membership.died(worker.number, _exit_words(code)))
        return self._failure is None

    def _can_go_on(self) -> bool:
        """Groups of torch (Gloo, NCCL) do not survive a member's death yet."""
        settings = self._job.settings
        by_memory = settings.transport == "shm" or (
            settings.transport == "auto" and (not self._job.gpus or settings.share_gpus)
        )
        return by_memory and self._count > 1 and not self._job.dry_run

    def _follow_up(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Publish(view, joins, why):
                    self._publish(view, joins, why)
                case Start(number, why):
                    self._folder.event("starting a worker", why, worker=number)
                    self._start_worker(number, self._free_place())
                case Kill(number, why):
                    self._folder.event("ending a worker", why, worker=number)
                    self._kill(self._workers[number])
                case GiveUp(why):
                    tail = self._workers[-1]
                    self._fail(Failure("the run:", why, "", 1, tail.number))

    def _publish(self, view: View, joins: bool, why: str) -> None:
        self._views[view.term] = view
        self._folder.event("view", why, term=view.term, workers=list(view.members))
        if joins:
            self._board.next_term = view.term
            self._tell_view(self._ready.pop(view.members[-1]), view)
            return
        self._board.next_term = 0
        self._terminal.notice(f"{why}; going on with {len(view.members)} worker{'s' * (len(view.members) != 1)}")
        for term in range(1, view.term):
            self._after.setdefault(term, view)
        for sock, term in self._asking_after:
            self._tell_view(sock, self._after[term])
        self._asking_after = []
        self._segments.forget(lambda name: _term_of(name) < view.term - 1)

    def _tell_view(self, sock: socket.socket, view: View) -> None:
        try:
            wire.send(sock, messages.Next(view.term, list(view.members), self._deaths))
        except OSError:
            return  # it is dying: its pidfd will say so

    def _inject(self, rows: list[Seen], seconds: float) -> None:
        for fault in list(self._faults):
            worker = fault.due(rows, seconds)
            if worker is not None:
                self._faults.remove(fault)
                self._folder.event("fault", fault.text, worker=worker, step=self._board.see(worker).step)
                self._kill(self._workers[worker])

    def _free_place(self) -> int:
        taken = {worker.place for worker in self._workers if worker.exit_code is None}
        return next(place for place in range(self._count + 1) if place not in taken)

    def _send_newcomers_home(self) -> None:
        """The members have finished: whoever is still on the way comes too late."""
        members = [self._workers[number] for number in self._membership.settled.members]
        if all(worker.exit_code is not None for worker in members):
            for worker in self._workers:
                self._kill(worker)

    def _drain(self, number: int) -> None:
        """Read what a dead worker had still said: its last words come before its end."""
        for sock in [s for s, owner in self._worker_of.items() if owner == number]:
            while sock in self._worker_of:
                readable = selectors.DefaultSelector()
                readable.register(sock, selectors.EVENT_READ)
                ready = readable.select(0)
                readable.close()
                if not ready:
                    break
                self._on_message(sock)

    def _check_odd_exits(self, now: float) -> None:
        """A worker that left with 0 while others still train has skipped the end of the script."""
        running = [w for w in self._workers if w.exit_code is None]
        if self._failure is not None or not running:
            return
        for worker in [self._workers[number] for number in self._membership.settled.members]:
            odd = worker.exit_code == 0 and self._board.see(worker.number).phase != Phase.FINISHED
            if odd and now - worker.exited_at > _ODD_EXIT_S:
                early = self._board.see(worker.number).phase == Phase.STARTING
                text = "ended without paceline.init()" if early else "left the script early, with exit code 0"
                self._fail(
                    Failure(f"worker {worker.number}", f"{text}, while others wait for it", "", 1, worker.number)
                )
                return

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._follow(last=True)  # what was printed before; the traceback itself is shown once, at the end
            self._failure = failure
            self._board.abort = Abort.WORKER_LOST

    def _on_signal(self, signum: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._board.stop_asked = True
            self._terminal.notice("stopping after this step; press Ctrl-C again to kill")
        else:
            self._killed = True
            self._board.abort = Abort.STOPPING
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in self._workers:
            self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        if worker.exit_code is None:
            try:
                os.killpg(worker.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    # messages

    def _on_connect(self, server: socket.socket) -> None:
        sock, _ = server.accept()
        sock.settimeout(5.0)
        if not wire.admit(sock, self._secret):
            self._folder.event("refused", "a connection without the run's secret")
            sock.close()
            return
        self._worker_of[sock] = -1
        self._selector.register(sock, selectors.EVENT_READ, self._on_message)

    def _on_message(self, sock: socket.socket) -> None:
        try:
            message, fds = wire.receive(sock, messages.ANY)
            for fd in fds:
                os.close(fd)
            self._answer(sock, message)
        except (OSError, ValueError):
            self._selector.unregister(sock)
            del self._worker_of[sock]
            self._asking = [(s, key) for s, key in self._asking if s is not sock]
            self._asking_after = [(s, term) for s, term in self._asking_after if s is not sock]
            sock.close()

    def _answer(self, sock: socket.socket, message: messages.Message) -> None:
        worker = self._worker_of[sock]
        match message:
            case messages.Hello():
                self._worker_of[sock] = message.worker
                view = self._membership.settled
                welcome = messages.Welcome(self._rows_made, view.term, list(view.members), self._deaths)
                wire.send(sock, welcome, (self._board.fd,))
            case messages.After():
                if message.term in self._after:
                    self._tell_view(sock, self._after[message.term])
                else:
                    self._asking_after.append((sock, message.term))
            case messages.Entering():
                self._tell_view(sock, self._views[message.term])
            case messages.Ready():
                self._ready[message.worker] = sock
                self._follow_up(self._membership.ready(message.worker))
            case messages.Healed():
                wire.send(sock, messages.Done())
                self._folder.event("joined", "it has the run's state", worker=message.worker)
                self._terminal.notice(f"worker {message.worker} has joined")
                self._board.next_term = 0
                self._segments.forget(lambda name: name.startswith("state-"))
                self._follow_up(self._membership.healed(message.worker))
            case messages.Segment():
                answer, fd = self._segments.grant(message.name, message.size, self._count)
                wire.send(sock, answer, (fd,) if fd is not None else ())
            case messages.Put():
                self._facts[message.key] = message.value
                wire.send(sock, messages.Done())
                for asker, key in [a for a in self._asking if a[1] == message.key]:
                    wire.send(asker, messages.Value(self._facts[key]))
                self._asking = [a for a in self._asking if a[1] != message.key]
            case messages.Get():
                if message.key in self._facts:
                    wire.send(sock, messages.Value(self._facts[message.key]))
                else:
                    self._asking.append((sock, message.key))
            case messages.Notice():
                self._terminal.notice(message.text)
                wire.send(sock, messages.Done())
            case messages.Failed():
                if not message.follows:
                    who = f"worker {worker}:"
                    self._fail(Failure(who, message.summary, message.traceback, message.exit_code, worker))
                wire.send(sock, messages.Done())
            case _:
                raise ValueError(f"a worker does not say {type(message).__name__}")


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
