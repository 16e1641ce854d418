"""What a terminal shows of a run that others lead: it listens, and nobody waits for it.

Everything comes from the run's folder (events with a `notice`, the logs) and from the board, which the
leader lends. The viewer may die and another one attach; leaders may die and the viewer finds the next.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType
from typing import Any

from paceline.cluster.rendezvous import Rendezvous
from paceline.folder import RunFolder
from paceline.state.checkpoint import listed
from paceline.watch.lines import Fold, Follower, Unsaid
from paceline.watch.terminal import Terminal
from paceline.wires import messages, wire
from paceline.wires.board import Board, Stop
from paceline.wires.link import LeaderLink

_TICK_S = 0.1
_LOST_S = 6.0
_GOES_S = 5.0

_STOPPING = {
    Stop.CTRL_C: "stopping after this step; press Ctrl-C again to kill",
    Stop.SIGTERM: f"{Stop.SIGTERM.words}: stopping after this step; SIGTERM once more kills",
}


class Viewer:
    def __init__(self, folder: RunFolder, place: Rendezvous, terminal: Terminal, show: str) -> None:
        self._folder, self._place, self._terminal, self._show = folder, place, terminal, show
        self._events = Follower(folder.events)
        self._logs: dict[int, Follower] = {}
        self._unsaid: dict[int, Unsaid] = {}
        self._fold = Fold()
        self._board: Board | None = None
        self._members: list[int] = []
        self._link = LeaderLink(place.address, place.secret, messages.Watch(), self._fence, _LOST_S)
        self._interrupts: list[Stop] = []
        self._told = self._acknowledged = 0
        """Ctrl-C, or SIGTERM; how many of them were told to the leader, and of how many that has said that it knows."""
        self._told_stop = False
        self._leader = -1
        self._failure: dict[str, Any] | None = None
        self._cut_short = False
        self._exit_code: int | None = None
        self._heard = time.monotonic()
        self._skip_what_was()

    def watch(self) -> int:
        """Until the run ends; its exit code."""
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._exit_code is None:
                self._listen()
                self._follow()
                if len(self._interrupts) > self._told:
                    self._tell_interrupt()
            while self._leader >= 0:  # one that was replaced in the middle of its end is followed by another
                self._wait_for_leader()
                self._follow()
            self._follow(last=True)
            return self._tell_end(self._exit_code)
        finally:
            self._terminal.close()
            self._link.close()
            if self._board is not None:
                self._board.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _fence(self) -> int:
        return self._board.leader if self._board is not None else self._place.fence()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts.append(Stop.SIGTERM if signum == signal.SIGTERM else Stop.CTRL_C)

    # the leader

    def _listen(self) -> None:
        """What the leader says; for a tick, if it says nothing."""
        try:
            if self._link.stale:
                self._hang_up()
            if not self._link.connected:
                self._connect()
            if select.select([self._link.fileno()], [], [], _TICK_S)[0]:
                self._take(*self._link.receive())
            self._heard = time.monotonic()
        except OSError:
            self._hang_up()
            time.sleep(_TICK_S)
            if self._exit_code is None and time.monotonic() - self._heard > _LOST_S and not self._is_led:
                self._tell_lost()
                self._exit_code, self._cut_short = 1, True

    @property
    def _is_led(self) -> bool:
        """Whether somebody leads the run although nobody answers here: one that is cut off is busy, not gone."""
        return self._board is not None and 0 < self._board.unled_s <= _LOST_S

    def _hang_up(self) -> None:
        """What this leader has not said that it knows is told to the next one."""
        self._link.close()
        self._told = self._acknowledged

    def _tell_lost(self) -> None:
        log = self._folder.logs / "agent.log"
        said = log.read_text(errors="replace").strip() if log.exists() else ""
        if said:
            self._terminal.notice(f"the last words of its agents:\n{said[-2000:]}")
        self._terminal.notice(
            f"no agent leads the run any more; if its workers live they stop by themselves, see {self._folder.logs}"
        )

    def _connect(self) -> None:
        answer, fds = self._link.attempt()
        assert isinstance(answer, messages.Welcome)
        if self._board is not None:
            self._board.close()
        self._board, self._members = Board(fds[0], answer.rows), answer.members
        self._know_leader(self._link.peer_pid)

    def _know_leader(self, pid: int) -> None:
        if self._leader >= 0:
            os.close(self._leader)
        try:
            self._leader = os.pidfd_open(pid)
        except OSError:  # it has gone meanwhile
            self._leader = -1

    def _wait_for_leader(self) -> None:
        """It has said its last word: when the command returns, nothing of the run is left."""
        select.select([self._leader], [], [], _GOES_S)
        os.close(self._leader)
        self._leader = -1

    def _take(self, message: Any, fds: list[int]) -> None:
        wire.close_all(fds)
        match message:
            case messages.Members(members):
                self._members = members
            case messages.Done():
                self._acknowledged += 1
            case messages.Ended(code):
                self._exit_code = code

    def _tell_interrupt(self) -> None:
        who, kill = self._interrupts[self._told], self._told > 0
        self._told += 1
        if not kill and not self._told_stop:
            self._told_stop = True
            self._terminal.notice(_STOPPING[who])
        try:
            if not self._link.connected:
                self._connect()
            self._link.send(messages.Stop(who, kill))
        except OSError:
            self._hang_up()  # there may be a new leader by the next tick

    # the folder

    def _follow(self, last: bool = False) -> None:
        for line in self._events.read():
            self._take_event(line)
        if self._board is not None:
            rows = [self._board.see(number) for number in self._members]
            known = [row for row in rows if row.step]  # main may be on a machine of which this board has no rows
            if known:
                self._terminal.progress(known)
        if self._failure is None:
            self._follow_logs(last)

    def _take_event(self, line: str) -> None:
        event = self._folder.parse(line)
        if event.get("notice"):
            self._terminal.notice(event["notice"])
        match event.get("event"):
            case "failed":
                self._follow_logs(last=True)  # what was printed before
                self._failure, self._cut_short = event, True
            case "stop asked for":
                self._cut_short = True
            case "ended":
                self._exit_code = event["exit_code"]
                if event.get("machine") == self._place.machine:  # it may be another one than was last heard of
                    self._know_leader(event["pid"])
            case "view" if event.get("workers") and not self._members:
                self._members = event["workers"]

    def _skip_what_was(self) -> None:
        """Show what happens from now on: the folder may have a past."""
        self._events.read()
        for path in self._folder.logs.glob("worker-*.log"):
            number = int(path.stem.removeprefix("worker-"))
            self._logs[number] = Follower(path)
            self._logs[number].read()

    def _follow_logs(self, last: bool) -> None:
        if self._show == "none":
            return
        now, main = time.monotonic(), self._members[0] if self._members else 0
        for path in self._folder.logs.glob("worker-*.log"):
            number = int(path.stem.removeprefix("worker-"))
            if self._show != "all" and number != main:
                continue
            unsaid = self._unsaid.setdefault(number, Unsaid())
            for line in filter(None, map(unsaid.of, self._logs.setdefault(number, Follower(path)).read(last))):
                if self._show == "all" and not line.endswith("\r"):
                    self._fold.add(number, line, now)
                else:
                    self._terminal.output(str(number), line)
        for who, text in self._fold.due(now, all=last):
            self._terminal.output(who, text)

    def _tell_how_to_go_on(self) -> None:
        """A run that was stopped, or has failed, can be brought to its end from a checkpoint."""
        address = self._folder.checkpoints
        if self._cut_short and "://" not in address and listed(address):
            self._terminal.notice(f"it can go on from its newest checkpoint: paceline resume {self._folder.id}")

    def _tell_end(self, code: int) -> int:
        self._tell_how_to_go_on()
        if self._failure is not None:
            failure = self._failure
            self._terminal.failure(failure["who"], failure["text"], failure["trace"], failure["log"])
            return code
        summary = self._folder.read_json(self._folder.summary)
        if "weights_sha256" in summary and self._show != "none":
            self._terminal.table(summary, str(self._folder.path))
        sys.stdout.flush()
        return code
