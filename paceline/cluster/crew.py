"""The worker processes of this machine: started through the nursery, seen through their pidfds.

A worker that has ended is told about once, with its exit code. The nursery is its parent and knows the
code; where the nursery is gone too, the code is what the worker itself wrote on the board, and a worker
that wrote nothing was killed. No torch in here.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.folder import RunFolder
from paceline.launch.nursing import Born, Closed, Exited, Fork, Nursery, Refused
from paceline.wires.board import Board

_CODE_MAY_TAKE_S = 0.5
"""How long after a worker's death the nursery may take to say its exit code."""
_STOPPED = "T"
_STAT_BYTES = 128
"""The state stands early in the line, behind a number and a name of at most 15 characters."""


@dataclass
class Worker:
    number: int
    pid: int = 0
    """0: asked for, not there yet."""
    pidfd: int = -1
    dead_at: float | None = None
    stopped_since: float | None = None


class Crew:
    """`on_end(number, exit code)`: negative codes are signals, as of subprocess."""

    def __init__(
        self,
        folder: RunFolder,
        board: Board,
        selector: selectors.BaseSelector,
        start_nursery: Callable[[], Nursery],
        on_start: Callable[[Worker], None],
        on_end: Callable[[int, int], None],
    ) -> None:
        self._folder, self._board, self._selector = folder, board, selector
        self._start_nursery, self._on_start, self._on_end = start_nursery, on_start, on_end
        self._workers: dict[int, Worker] = {}
        self._asked: dict[int, Fork] = {}
        """Workers that the nursery has not made yet."""
        self._nursery: Nursery | None = None
        self._has_forked = False

    # starting

    def use(self, nursery: Nursery) -> None:
        """This one forks the workers."""
        self._nursery = nursery
        self._selector.register(nursery, selectors.EVENT_READ, lambda _: self._hear_nursery())

    def start(self, fork: Fork) -> None:
        """Its process is there when the nursery has forked it; asking twice starts one."""
        self._workers.setdefault(fork.worker, Worker(fork.worker))
        self._asked[fork.worker] = fork
        if self._nursery is not None:
            self._nursery.ask(fork)
        else:
            self._new_nursery()

    def _new_nursery(self) -> None:
        self.use(self._start_nursery())
        assert self._nursery is not None
        for fork in self._asked.values():
            self._nursery.ask(fork)

    def adopt(self, number: int, pid: int, pidfd: int | None) -> None:
        """A worker that an earlier leader has started. Without its pidfd it is looked for by its number."""
        try:
            self._take(Worker(number, pid, pidfd if pidfd is not None else os.pidfd_open(pid)))
        except ProcessLookupError:
            self._workers[number] = Worker(number, pid, dead_at=time.monotonic())

    def _take(self, worker: Worker) -> None:
        self._workers[worker.number] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda _: self._see_death(worker))
        self._on_start(worker)

    def _hear_nursery(self) -> None:
        assert self._nursery is not None
        for event in self._nursery.on_ready():
            match event:
                case Born(number, pid, pidfd):
                    self._has_forked = True
                    self._asked.pop(number, None)
                    self._forked(number, pid, pidfd)
                case Exited(number, status):
                    self._ended(number, status)
                case Refused(number, why):
                    raise NurseryError(f"worker {number} cannot be started: {why}")
                case Closed():
                    self._lose_nursery()

    def _forked(self, number: int, pid: int, pidfd: int) -> None:
        known = self._workers.get(number)
        if known is not None and not known.pid:
            self._take(Worker(number, pid, pidfd))
            return
        if known is None:  # it has ended, or was to be killed before it was there
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)

    def _lose_nursery(self) -> None:
        """It died. Workers live on; whoever was asked for is asked for again, of a new one."""
        assert self._nursery is not None
        self._selector.unregister(self._nursery)
        failed = self._nursery.failed
        self._nursery.close()
        self._nursery = None
        if failed and not self._has_forked:
            raise NurseryError("the process that starts workers failed before it had started one")
        self._folder.event("nursery lost", "the process that starts workers is gone; another one starts")
        self._new_nursery()

    # ending

    def _see_death(self, worker: Worker) -> None:
        if self._workers.get(worker.number) is not worker:
            return  # the nursery has told it in the same turn
        self._selector.unregister(worker.pidfd)
        worker.dead_at = time.monotonic()
        if self._nursery is None:
            self._end_without_code(worker)

    def _end_without_code(self, worker: Worker) -> None:
        code = self._board.exit_code(worker.number)
        self._ended(worker.number, -signal.SIGKILL if code is None else code)

    def _ended(self, number: int, code: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        if worker.pidfd >= 0:
            if worker.dead_at is None:
                self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
        if self._nursery is None:
            self.kill_group(worker)  # its loader processes; otherwise the nursery has done it
        self._on_end(number, code)

    def tick(self, now: float) -> None:
        """Deaths of which the nursery says nothing."""
        for worker in list(self._workers.values()):
            if worker.dead_at is not None and now - worker.dead_at > _CODE_MAY_TAKE_S:
                self._end_without_code(worker)

    def frozen(self, now: float, lease_s: float) -> list[Worker]:
        """Workers that have been stopped (SIGSTOP) for longer than their lease.

        A held GIL, a long backward or a debugger are none of that: the kernel says who is stopped.
        """
        found = []
        for worker in self._workers.values():
            if not worker.pid or _state(worker.pid) != _STOPPED:
                worker.stopped_since = None
                continue
            worker.stopped_since = worker.stopped_since or now
            if now - worker.stopped_since >= lease_s:
                found.append(worker)
        return found

    def signal(self, number: int, signum: int) -> None:
        worker = self._workers.get(number)
        if worker is not None and worker.pidfd >= 0:
            try:
                signal.pidfd_send_signal(worker.pidfd, signum)
            except ProcessLookupError:
                return

    def kill(self, number: int) -> None:
        """The worker and the processes it has started."""
        worker = self._workers.get(number)
        if worker is not None:
            self._asked.pop(number, None)
            if not worker.pid:
                self._ended(number, -signal.SIGKILL)
                return
            self.signal(number, signal.SIGKILL)
            self.kill_group(worker)

    def kill_group(self, worker: Worker) -> None:
        if worker.pid:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    @property
    def numbers(self) -> list[int]:
        """Workers that are there or asked for."""
        return list(self._workers)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each worker that is there."""
        return {number: worker.pid for number, worker in self._workers.items() if worker.pid}

    @property
    def nursery_pid(self) -> int:
        """0: there is none, or it has not said."""
        return self._nursery.pid if self._nursery is not None else 0

    def kill_all(self) -> None:
        for number in list(self._workers):
            self.kill(number)

    def close(self, quit_nursery: bool) -> None:
        """Let go of everything; the workers and, unless told otherwise, the nursery live on. Twice is once."""
        if self._nursery is not None:
            self._selector.unregister(self._nursery)
            self._nursery.quit() if quit_nursery else self._nursery.close()
            self._nursery = None
        for worker in self._workers.values():
            if worker.pidfd >= 0:
                if worker.dead_at is None:
                    self._selector.unregister(worker.pidfd)
                os.close(worker.pidfd)
        self._workers = {}


class NurseryError(Exception):
    """No worker can be started."""


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(_STAT_BYTES)
    except OSError:
        return ""
    return chr(text[text.rindex(b")") + 2])
