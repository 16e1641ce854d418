"""The coordinator: what the leader decides about the run, written to the store before anybody is told.

`membership` says who is in the run; this is its shell: it notes down in the journal, and has workers
started and killed. It knows no sockets and no board: each machine's `Node` does what the journal says.
No torch in here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.cluster.admiral import Admiral
from paceline.cluster.blame import Raised, why_it_ends
from paceline.cluster.ends import KILLS, crash_trace, exit_words
from paceline.cluster.job import Job
from paceline.cluster.journal import End, Failure, Journal
from paceline.cluster.membership import GiveUp, Instruction, Kill, Publish, Standing, Start
from paceline.cluster.office import Office
from paceline.cluster.rollback import Rollback
from paceline.errors import OvertakenError
from paceline.folder import RunFolder
from paceline.strategies import find
from paceline.wires import messages
from paceline.wires.board import Phase, Stop
from paceline.wires.view import View

_LOST = -signal.SIGKILL
"""The exit code of a worker whose machine was lost, for want of a better one."""


class Coordinator:
    """`start` and `kill` act on a worker by its number; `changed` is called when the journal has."""

    def __init__(self, job: Job, folder: RunFolder, office: Office, journal: Journal) -> None:
        self._job, self._folder, self._office = job, folder, office
        self.journal, self.membership = journal, journal.membership
        self.ended_at: dict[int, float] = {}
        """When each worker was seen to end."""
        self.rollback = Rollback(self, job, folder)
        self._admiral = Admiral(self, job.settings, folder)
        self.start: Callable[[int], None]
        self.kill: Callable[[int], None]
        self.changed: Callable[[], None]

    def save(self, views: list[View] | None = None) -> None:
        """FencedError, StoreUnreachable: another agent leads or will, and nothing of this one's counts any more."""
        self._office.write(self.journal.encode(), views or [])

    def decide(self, worker: int, message: msgspec.Struct) -> msgspec.Struct | None:
        """What comes of a message that changes the run; no answer where the journal will have it."""
        match message:
            case messages.Ready():
                self.follow_up(self.membership.ready(worker))
                return None
            case messages.CaughtUp():
                self._folder.event("caught up", "it follows, and can be let in", worker=worker)
                self.follow_up(self.membership.ready(worker))
            case messages.Healed():
                self._joined(worker)
            case messages.Put(key, value):
                self.journal.facts[key] = value
                self.save()
                self.changed()
            case messages.Claim(slots):
                return self._claim(worker, slots)
            case messages.ServerReady() | messages.Sizes() | messages.Filled():
                self._admiral.hear(worker, message)
            case messages.GoBack(why):
                if self.membership.standing[worker] is not Standing.GONE and not self.over:
                    self.rollback.begin(why)
            case messages.RolledBack(step):
                self.rollback.told(step)
            case messages.Failed():
                if not message.follows and not self.rollback.under_way:
                    self._raised(worker, message)
            case messages.Stop(who, kill):
                self.stop(who, _kill_words(who) if kill else who.words, kill)
            case messages.Scale(workers, servers):
                refusal = self._scale(workers, servers)
                return messages.Refused(refusal) if refusal else messages.Done()
            case _:
                raise ValueError(f"nobody says {type(message).__name__} to a coordinator")
        return messages.Done()

    # who is in the run

    def follow_up(self, instructions: list[Instruction]) -> None:
        """Written down first; then told and done."""
        self.save(self.journal.enter(instructions))
        self.changed()
        for instruction in instructions:
            match instruction:
                case Publish(view, agreed, why):
                    self._tell_view(view, agreed, why)
                case Start(number, why):
                    self._folder.event("starting a worker", why, worker=number)
                    self.start(number)
                case Kill(number, why):
                    self._folder.event("ending a worker", why, worker=number)
                    self.kill(number)
                case GiveUp(why):
                    self.fail("the run:", why, worker=max(self.membership.standing))

    def _tell_view(self, view: View, agreed: bool, why: str) -> None:
        count = len(view.members)
        notice = {} if agreed else {"notice": f"{why}; going on with {count} worker{'s' * (count != 1)}"}
        self._folder.event("view", why, term=view.term, workers=list(view.members), **notice)

    def _joined(self, worker: int) -> None:
        """A newcomer has the run's state."""
        instructions = self.membership.healed(worker)
        fields = self._home_of(worker)
        self._folder.event(
            "joined", "it has the run's state", worker=worker, notice=f"worker {worker} has joined", **fields
        )
        self.follow_up(instructions)

    def _claim(self, worker: int, slots: list[int]) -> messages.Value:
        """Which replica this worker is to train."""
        before = dict(self.journal.replicas)
        slot = self.journal.claim(worker, slots)
        if self.journal.replicas != before:
            self.save()
            self.changed()
        return messages.Value("" if slot is None else str(slot))

    def leaves(self, number: int) -> None:
        """A worker that was told to go (SIGTERM) leaves at a step's end; if all are, the run stops."""
        standing = self.membership.standing.get(number)
        on_the_way = standing in (Standing.STARTING, Standing.READY) and number not in self.journal.doomed
        if standing is Standing.MEMBER or on_the_way:
            self._folder.event("leaving", "it was told to end (SIGTERM)", worker=number)
            self.follow_up(self.membership.leave(number))
        if self.membership.all_leave and not self.journal.stop:
            self.stop(Stop.SIGTERM, "every worker was told to end (SIGTERM)")

    def main_is_ready(self) -> None:
        if not self.journal.main_ready:
            self.journal.main_ready = True
            self.save()
            self.changed()

    def _scale(self, workers: int | None, servers: int | None) -> str:
        """Train with so many; why not, if that cannot be."""
        if self.rollback.under_way:
            return "the run is going back to a checkpoint: ask again in a second"
        refusal = self._why_not(workers) if workers is not None else ""
        refusal = refusal or (self._admiral.why_not(servers) if servers is not None else "")
        if refusal:
            return refusal
        if workers is not None:
            words = f"going to {workers} worker{'s' * (workers != 1)}"
            self._folder.event("scaling", f"{workers} workers were asked for", notice=words)
            self.follow_up(self.membership.scale(workers))
        if servers is not None:
            self._admiral.scale(servers)
        return ""

    def _why_not(self, workers: int) -> str:
        slots = self._slots()
        if not 1 <= workers <= slots:
            return f"{workers} workers for {slots} slots: a run trains with 1 to {slots} workers"
        if find(self._strategy()).apart:
            return f"with --strategy {self._strategy()} each of the {slots} workers trains a replica of its own: there are {slots}"
        more = workers - self.membership.reach
        if more > self.membership.starts_left:
            return (
                f"{workers} workers: this run may start {self.membership.starts_left} more, and that would need {more}"
            )
        if workers > self.journal.room:
            return f"{workers} workers, and the machines have places for {self.journal.room}: let another machine join"
        return ""

    def _slots(self) -> int:
        return int(self.setting("slots"))

    def _strategy(self) -> str:
        return str(self.setting("strategy"))

    def setting(self, name: str) -> Any:
        """The script's init() may have set it."""
        settings = self._folder.read_json(self._folder.config).get("settings", {})
        return settings.get(name, getattr(self._job.settings, name))

    # machines come and go

    def machine_came(self, number: int) -> None:
        """It is new, or back; when all are there that were waited for, the workers start."""
        machine = self.journal.machines[number]
        if machine.here:
            return
        machine.here = True
        words = f"machine {number} ({machine.name}) is here, with places for {machine.places} workers"
        self._folder.event("machine", words, machine=number, notice=words)
        if not self.journal.awaited:
            self.follow_up(self.membership.make_room(self.journal.room, f"machine {number} has places"))
            self._admiral.spread(f"machine {number} is here")
        elif self.journal.complete:
            self.journal.settle_in()
            self.save()
            self.changed()
            for worker in self.journal.running:
                self.start(worker)
        else:
            self.save()
            self._tell_short()

    def _tell_short(self) -> None:
        """All machines are there, and have too few places."""
        journal, wanted = self.journal, len(self.membership.standing)
        if sum(1 for machine in journal.machines.values() if machine.here) >= journal.awaited:
            words = f"places for {journal.room} of {wanted} workers: let another machine join, or give --places"
            self._folder.event("awaiting", words, notice=words)

    def machine_goes(self, number: int) -> None:
        """It was told to go: nobody is started there any more."""
        if self.journal.machines[number].here:
            self._close_machine(number, "was told to go (SIGTERM)")
            self._admiral.spread(f"machine {number} goes")

    def machine_went(self, number: int, why: str) -> None:
        """Nothing was heard of it for a lease: the run goes on without its workers, whatever they do."""
        there = [worker for worker in self.journal.running if self.journal.homes[worker] == number]
        if self.journal.machines[number].here or there:
            self._close_machine(number, why)
        for worker in there:
            if worker in self.journal.running:
                self._give_up_on(worker, f"was lost with machine {number}")

    def _close_machine(self, number: int, why: str) -> None:
        machine = self.journal.machines[number]
        machine.here = False
        self.membership.room = self.journal.room
        words = f"machine {number} ({machine.name}) {why}"
        self._folder.event("machine", words, machine=number, notice=words)
        self.save()

    def _give_up_on(self, worker: int, why: str) -> None:
        if worker in self.journal.servers:
            self._admiral.server_ended(worker, _LOST, why)
            return
        self.journal.exits[worker] = _LOST
        self._folder.event("worker ended", f"it {why}", worker=worker)
        if self.over or self.membership.standing[worker] is Standing.GONE:
            self.save()
        else:
            self.lose(worker, why)

    # workers come and go

    def worker_started(self, number: int, pid: int) -> None:
        if self.journal.pids.get(number) == pid:
            return  # taken over from the last leader
        self.journal.pids[number] = pid
        self.save()
        if number in self.journal.servers:
            _, server = self.journal.role(number)
            self._folder.event("server started", "it holds parameters", server=server, pid=pid, **self._home_of(number))
            return
        self._folder.event("worker started", self._why_started(number), worker=number, pid=pid, **self._home_of(number))

    def _home_of(self, number: int) -> dict[str, int]:
        return {"machine": self.journal.homes[number]} if len(self.journal.machines) > 1 else {}

    def _why_started(self, number: int) -> str:
        place = self.journal.places[number]
        if number < self._job.workers:
            return "the run begins"
        if self.journal.rolled.times and number in self.membership.settled.members:
            return "the run begins again, from a checkpoint"
        if number < self._job.workers + self._job.spares:
            return "a spare, for whoever is lost"
        return f"it stands for worker {place}" if len(self.journal.machines) == 1 else "it stands for one that was lost"

    def worker_ended(self, number: int, end: End) -> None:
        if number in self.journal.exits:
            return
        if number in self.journal.servers:
            self._admiral.server_ended(number, end.code)
            return
        code, phase = end.code, end.phase
        self.journal.exits[number] = code
        self.ended_at[number] = time.monotonic()
        gone = self.membership.standing[number] is Standing.GONE
        if gone:  # whoever met it in a view that was overtaken must not wait for it
            self.journal.buried.append(number)
        self._folder.event("worker ended", exit_words(code), worker=number, exit_code=code)
        # Its end and what follows from it are written down together: a next leader would take the end alone for dealt with.
        if not self.over and not gone and code == 0 and phase == Phase.LEFT:
            instructions = self.membership.left(number)
            if _overtakes(instructions):
                self.journal.buried.append(number)  # a death overtook its leave: others wait for it once more
            self.follow_up(instructions)
        elif not self.over and not gone and code == 0 and phase == Phase.FINISHED:
            self.follow_up(self.membership.finished(number, end.term))
        elif not self.over and not gone and code and not self._survives(number, code, phase):
            trace = crash_trace(self._folder.log_of("worker", number)) if code < 0 else ""
            self.fail(f"worker {number}", exit_words(code), trace, 1 if code < 0 else code, number)
        else:
            self.save()
            self.changed()

    def _raised(self, worker: int, failed: messages.Failed) -> None:
        """A worker ends with an error: its own, as far as anybody can tell, or one that ends the run."""
        if self._has_raised(worker):
            return  # told again: the leader that noted it did not come to say so
        why: str | None = ""
        if failed.step >= 0 and not self._job.dry_run:
            raised = Raised.of(worker, failed.summary, failed.step, failed.slot)
            why = why_it_ends(self.journal.raised, raised, len(self._who_remains_without(worker)))
            if why is None and not self.over:
                self._note(raised, failed.traceback)
                return
        text = f"{failed.summary} ({why})" if why else failed.summary
        who = f"{self.journal.name(worker)}:" if worker >= 0 else "the run:"
        self.fail(who, text, failed.traceback, failed.exit_code, worker)

    def _note(self, raised: Raised, trace: str) -> None:
        """The run goes on without this worker, once its process has ended."""
        self.journal.raised.append(raised)
        self.save()
        words = f"worker {raised.worker} raised {raised.said} at {raised.place}"
        self._folder.event(
            "raised",
            words,
            worker=raised.worker,
            step=raised.step,
            slot=raised.slot,
            trace=trace,
            notice=f"{words}; if another worker raises it there too, the run ends (traceback: "
            f"{self._folder.log_of('worker', raised.worker)})",
        )

    def _has_raised(self, worker: int) -> bool:
        return any(raised.worker == worker for raised in self.journal.raised)

    def _who_remains_without(self, worker: int) -> list[int]:
        members, exits = self.membership.settled.members, self.journal.exits
        return [m for m in members if m != worker and m not in exits and not self._has_raised(m)]

    def _survives(self, number: int, code: int, phase: Phase) -> bool:
        """Whether the run goes on without this worker, which has just ended."""
        if self._has_raised(number):
            self.lose(number, "has ended after its exception")
            return self.journal.failure is None
        a_newcomer = number not in self.membership.settled.members
        given_up = a_newcomer and (code < 0 or code == OvertakenError.exit_code)
        if not given_up and (code not in KILLS or self._job.dry_run):
            return False
        if phase == Phase.FINISHED:
            return True
        if self._job.workers == 1 and len(self.membership.settled.members) == 1 and not a_newcomer:
            return False  # its own words say it better than that nobody is left
        self.lose(number, exit_words(code))
        return self.journal.failure is None

    def lose(self, number: int, why: str) -> None:
        """The run goes on without this worker."""
        instructions = self.membership.died(number, why)
        self.journal.deaths += _overtakes(instructions)
        self.journal.buried.append(number)
        self.follow_up(instructions)

    def end_newcomers(self) -> None:
        """The members have finished: whoever is still on the way comes too late."""
        exits = self.journal.exits
        late = self.journal.running
        if late and not self.rollback.under_way and all(number in exits for number in self.membership.settled.members):
            self.membership.starts_left = self.journal.fleet.starts_left = 0  # nobody comes in their place
            if not set(late) <= set(self.journal.doomed):
                self.journal.doomed = sorted({*self.journal.doomed, *late})
                self.save()
                self.changed()
            for number in late:
                self.kill(number)

    # the end

    @property
    def over(self) -> bool:
        return self.journal.failure is not None or bool(self.journal.killed)

    def fail(self, who: str, text: str, trace: str = "", exit_code: int = 1, worker: int = -1) -> None:
        if not self.over:
            self.journal.awaited = 0
            self.journal.failure = Failure(who, text, trace, exit_code, worker)
            self.save()
            self.changed()

    def stop(self, who: Stop, why: str, kill: bool = False) -> None:
        """After this step, or at once."""
        self.journal.stop = self.journal.stop or who
        self.journal.awaited = 0  # whoever was waited for need not come any more
        if kill:
            self.journal.killed = why
        self.save()
        self._folder.event("stop asked for", why)
        self.changed()
        if kill:
            for number in self.journal.running:
                self.kill(number)


def _overtakes(instructions: list[Instruction]) -> bool:
    """Whether those who train are given another view, inside their step."""
    return any(isinstance(each, Publish) and not each.agreed for each in instructions)


def _kill_words(who: Stop) -> str:
    words = {Stop.CTRL_C: "a second Ctrl-C", Stop.SIGTERM: "a second SIGTERM"}
    return f"killed by {words.get(who, '`paceline stop --kill`')}"
