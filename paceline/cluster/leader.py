"""The agent that leads a run: one loop over workers, questions, other machines and the clock. No torch in here.

It is not on the path of a step. If it dies or freezes, another agent goes on from the store under the
next fence; if it thaws, it finds itself fenced and steps down.
"""

from __future__ import annotations

import os
import signal
import socket
import time

import msgspec

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.crew import NurseryError
from paceline.cluster.ending import conclude
from paceline.cluster.injection import Injection
from paceline.cluster.journal import End, Journal
from paceline.cluster.node import GRACE_S, TICK_S, Node
from paceline.cluster.office import Office
from paceline.cluster.outposts import Outposts
from paceline.cluster.store import FencedError, StoreUnreachable
from paceline.cluster.verdict import QUIET_S, stuck, verdict
from paceline.errors import PacelineError
from paceline.wires import wire
from paceline.wires.board import Phase, Seen, Stop
from paceline.wires.connection import Connection
from paceline.wires.door import Door

_ODD_EXIT_S = 1.0
_NO_KILL = "PACELINE_EVICT_WITHOUT_KILL"
"""Set by a test: what if the kill of a frozen worker came too late?"""


class Leader:
    """Leads from the machine of `node`; what is decided goes to the office.

    `door` is where other machines' agents come in, if there are any.
    """

    def __init__(self, node: Node, office: Office, journal: Journal, door: socket.socket | None = None) -> None:
        self._node, self._office = node, office
        self._failed_at: float | None = None
        self._job, self._folder, self._board, self._crew = node.job, node.folder, node.board, node.crew
        self._coordinator = Coordinator(node.job, node.folder, office, journal)
        self._coordinator.start, self._coordinator.kill = self._start, node.crew.kill
        self._coordinator.changed = self._changed
        self._coordinator.rollback.reached = self._reached
        self._told_wait, self._quiet_s = 0.0, QUIET_S
        self._ended_stuck: set[int] = set()
        self._looked_at = 0.0
        self._outposts: Outposts | None = None
        if door is not None:
            self._outposts = Outposts(_secured(door, node.place.secret), node, self._coordinator, office.fence)
        plan = Injection.of(self._job.faults, journal.faults)
        self._injection = Injection(plan, node, self._signal)

    @property
    def journal(self) -> Journal:
        return self._coordinator.journal

    def lead(self) -> int | None:
        """Until the run ends (its exit code), or this machine has left it (0), or another agent leads (None)."""
        try:
            self._begin()
            while self.journal.running or self.journal.awaited or self._coordinator.rollback.under_way:
                self._turn()
                if self._has_left:
                    return self._leave()
            return self._end()
        except NurseryError as error:
            self._coordinator.fail("the run:", str(error), self._node.log_tail("nursery"))
            self._crew.kill_all()
            return self._end()
        except PacelineError as error:  # the store refuses what is written
            self._folder.event("over", str(error), notice=str(error))
            self._crew.kill_all()
            self._node.leave(1)
            return 1
        except (FencedError, StoreUnreachable) as error:
            self._folder.event("stepped down", str(error), fence=self._office.fence)
            return None
        finally:
            if self._outposts is not None:
                self._outposts.close()

    def _begin(self) -> None:
        journal = self.journal
        # One whose machine was told to go has handed the run on. Of one that was lost, nobody has written that yet.
        journal.leaders_lost += self._office.fence > 1 and journal.machines[journal.led_from].here
        journal.led_from = self._node.number
        self._coordinator.save()
        if self._office.fence == 1:
            me = {"pid": os.getpid(), "machine": self._node.number}
            self._folder.event("launched", self._job.words, workers=self._job.workers, **me)
        else:
            self._folder.event(
                "leading",
                "the agent that led before is gone or frozen",
                fence=self._office.fence,
                pid=os.getpid(),
                machine=self._node.number,
                notice=f"the coordinator is gone: {self._successor} leads now",
            )
        self._node.begin(self)
        for number, end in list(self._node.exits.items()):
            if self.journal.homes.get(number) == self._node.number:
                self._coordinator.worker_ended(number, end)  # seen while nobody led; what is known returns at once
        if not self._node.told_to_go:
            self._coordinator.machine_came(self._node.number)  # it may have been given up before it led
        if self._outposts is not None and self.journal.awaited:
            words = (
                f"waiting for {self._missing} more machines; on each of them: paceline agent --join "
                f"{self._outposts.address} --secret-file {self._folder.secret}"
            )
            self._folder.event("awaiting", words, address=self._outposts.address, notice=words)

    @property
    def _missing(self) -> int:
        return self.journal.awaited - sum(1 for machine in self.journal.machines.values() if machine.here)

    @property
    def _successor(self) -> str:
        return "the standby" if self._node.fence > 1 else f"the agent of machine {self._node.number}"

    def _turn(self) -> None:
        # A plan of faults wants to be met to the step.
        tick_s = TICK_S if self._injection.plan.over else TICK_S / 10
        now = self._node.turn(tick_s)
        self._office.hold()
        if now - self._looked_at >= tick_s:
            self._looked_at = now
            self._board.led()
            self._look_around(now)

    def _look_around(self, now: float) -> None:
        rows = [self._board.see(number) for number in self.journal.membership.settled.members]
        self._tell_waits(rows, now)
        self._end_stuck(rows)
        self._check_odd_exits(rows, now)
        self._node.look_around(now)
        if self._board.main_ready:
            self._coordinator.main_is_ready()
        self._coordinator.end_newcomers()
        self._coordinator.rollback.go_on()
        self._inject(rows, time.time() - self.journal.started)
        if self._node.told_to_go:
            self._go()
        if self._outposts is not None:
            for words in self._outposts.tick(now):
                self._folder.event("refused", words)
        if self.journal.failure is not None:
            self._failed_at = self._failed_at or now
            if now - self._failed_at > GRACE_S:
                self._crew.kill_all()

    # leaving

    def _go(self) -> None:
        """Its workers leave at a step's end, and then this machine does. If nobody can go on elsewhere, the run stops."""
        number = self._node.number
        if not self.journal.machines[number].here or self._others_can_go_on:
            self._coordinator.machine_goes(number)
            self._node.send_workers_off()
        elif not self.journal.stop:
            self._coordinator.stop(Stop.SIGTERM, "the agent was told to end (SIGTERM)")

    @property
    def _others_can_go_on(self) -> bool:
        """Whether there is a machine that trains, whose agent may lead."""
        return self._office.may_pass_on and not self.journal.awaited and bool(self._homes_elsewhere)

    @property
    def _homes_elsewhere(self) -> list[int]:
        journal = self.journal
        homes = {journal.homes[member] for member in journal.membership.settled.members}
        return [home for home in homes if home != self._node.number and journal.machines[home].here]

    @property
    def _has_left(self) -> bool:
        """Nobody trains here any more, and there is somebody who can lead."""
        if not self._node.told_to_go or self._node.mine or self._coordinator.over or self.journal.stop:
            return False
        return self._outposts is not None and any(map(self._outposts.reaches, self._homes_elsewhere))

    def _leave(self) -> int:
        self._office.hand_on()
        words = f"machine {self._node.number} has left, and another one leads"
        self._folder.event("stepped down", words, fence=self._office.fence, machine=self._node.number, notice=words)
        self._node.leave(0)
        return 0

    # the end

    def _end(self) -> int:
        self._tell_what_never_came()
        code = conclude(self._job, self._folder, self.journal, self._board)
        self.journal.exit_code = code
        self._coordinator.save()  # for those who do not hear it now
        if self._outposts is not None:
            self._outposts.end()
        self._office.close_for_good()
        self._node.leave(code)
        return code

    def _tell_what_never_came(self) -> None:
        if step := self._reached():  # else there was no run to speak of
            for words in self._injection.plan.missed(step, time.time() - self.journal.started):
                self._folder.event("no fault", words, notice=words)

    def _changed(self) -> None:
        self._node.show()
        if self._outposts is not None:
            self._outposts.tell()

    def _signal(self, number: int, signum: int) -> None:
        """To a worker or a server, wherever it is."""
        if number in self._crew.numbers:
            self._crew.signal(number, signum)
        elif self._outposts is not None:
            self._outposts.hit(number, signum)

    def _start(self, number: int) -> None:
        if self.journal.homes[number] == self._node.number:
            self._node.start(number)

    # what happens on this machine: see node.Master

    def worker_started(self, number: int, pid: int) -> None:
        self._coordinator.worker_started(number, pid)

    def worker_ended(self, number: int, end: End) -> None:
        self._coordinator.worker_ended(number, end)

    def worker_leaves(self, number: int) -> None:
        self._coordinator.leaves(number)

    def evict(self, number: int, why: str) -> None:
        if _NO_KILL not in os.environ:
            self._crew.kill(number)
        elif number not in self.journal.buried:
            self._coordinator.lose(number, why)

    def decide(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        answer = self._coordinator.decide(worker, message)
        if answer is not None:
            peer.send(answer)

    # the look-out

    def _reached(self) -> int:
        return max(self._board.see(number).step for number in self.journal.membership.settled.members)

    def _check_odd_exits(self, rows: list[Seen], now: float) -> None:
        """A worker that left with 0 while others still train has skipped the end of the script."""
        if self.journal.failure is not None:
            return
        for number, phase in [(row.worker, row.phase) for row in rows]:
            odd = self.journal.exits.get(number) == 0 and phase not in (Phase.FINISHED, Phase.LEFT)
            if odd and now - self._coordinator.ended_at.get(number, now) > _ODD_EXIT_S:
                text = (
                    "ended without paceline.init()"
                    if phase == Phase.STARTING
                    else "left the script early, with exit code 0"
                )
                self._coordinator.fail(f"worker {number}", f"{text}, while others wait for it", "", 1, number)
                return

    def _tell_waits(self, rows: list[Seen], now: float) -> None:
        if self.journal.failure is not None or self.journal.awaited:
            return
        found = verdict([row for row in rows if self._knows_of(row.worker)])
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
                self._signal(worker, signal.SIGUSR1)

    def _end_stuck(self, rows: list[Seen]) -> None:
        """A deadlock, a driver that does not answer: from outside it looks like a long step, so the user says how long one may be."""
        limit_s = self._job.settings.step_timeout
        if not limit_s or self.journal.failure is not None or self.journal.awaited:
            return
        worker = stuck([row for row in rows if self._knows_of(row.worker)], limit_s)
        if worker is not None and worker not in self._ended_stuck:
            self._ended_stuck.add(worker)
            words = f"others waited {limit_s:g} s for it, and it did not go on"
            self._folder.event("evicted", words, worker=worker, notice=f"worker {worker} is ended: {words}")
            self._signal(worker, signal.SIGKILL)

    def _knows_of(self, worker: int) -> bool:
        """Whether its row is of now: a new leader has heard of nobody yet."""
        home = self.journal.homes[worker]
        return home == self._node.number or (self._outposts is not None and self._outposts.reaches(home))

    def _inject(self, rows: list[Seen], seconds: float) -> None:
        plan = self._injection.plan
        if plan.over:
            return
        members, servers = [row.worker for row in rows], sorted(self.journal.fleet.addresses)
        actions = plan.due(max(row.step for row in rows), seconds, members, servers)
        if actions:
            self.journal.faults = plan.state()
            self._coordinator.save()  # first: the next leader must not be hit by the same fault
            self._injection.carry_out(actions)


def _secured(listening: socket.socket, secret: bytes) -> Door:
    """A door to other machines: with TLS, unless they are this one."""
    sock = listening.dup()
    if wire.is_loopback(sock.getsockname()[0]):
        return Door(sock, secret, time.monotonic())
    from paceline.wires.tls import Identity  # costs some ms, and most runs have one machine

    return Door(sock, secret, time.monotonic(), Identity.make())
