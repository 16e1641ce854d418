"""The run's other machines, as the agent that leads sees them: who they are, and when one is lost.

A machine is not lost because its connection breaks: its agent may have died, and its standby is on the
way. It is lost when nothing was heard of it for a lease. No torch in here.
"""

from __future__ import annotations

import time

import msgspec

from paceline.cluster import between
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.journal import Machine
from paceline.cluster.node import Node
from paceline.cluster.reception import Reception
from paceline.wires import messages, wire
from paceline.wires.connection import Connection
from paceline.wires.door import Door

_END_S, _LOOK_S = 1.0, 0.005
_LAST_CALL_S = 0.2


class Outposts(Reception):
    """`node` is this machine's part, `fence` under which this agent leads."""

    def __init__(self, door: Door, node: Node, coordinator: Coordinator, fence: int) -> None:
        super().__init__(door, node.selector, between.TO_LEADER)
        self._coordinator, self._fence = coordinator, fence
        self._board, self._job, self._run, self._store = node.board, node.job, node.folder.id, node.place.reach.run
        self._machine_of: dict[Connection, int] = {}
        """Peers that have said for which machine they speak."""
        now, journal = time.monotonic(), coordinator.journal
        there = {number for number, machine in journal.machines.items() if machine.here}
        there |= {journal.homes[worker] for worker in journal.running}  # it may go, or have been given up by half
        self._heard = dict.fromkeys(sorted(there - {node.number}), now)
        """When each of the other machines was last heard of: a new leader gives them a lease's time to come."""
        if coordinator.journal.led_from in self._heard:  # it was silent for a lease before another one could lead
            self._heard[coordinator.journal.led_from] = now - node.job.settings.lease + _LAST_CALL_S

    @property
    def address(self) -> str:
        """Where a further machine joins, HOST:PORT."""
        return self._door.address

    # who comes

    def take(self, peer: Connection, message: msgspec.Struct) -> None:
        machine = self._machine_of.get(peer)
        match message:
            case between.Inquire():
                self._describe(peer, message)
            case between.Join(identity, going):
                self._admit(peer, identity, going)
            case between.Report() if machine is not None:
                self._heard[machine] = time.monotonic()
                self._note(machine, message)
            case between.Ask(number, worker, raw) if machine is not None:
                said = wire.decode(raw, messages.ANY)
                if worker >= 0 and self._coordinator.journal.homes.get(worker) != machine:
                    raise ValueError(f"worker {worker} is not on machine {machine}")
                answer = self._coordinator.decide(worker, said)
                if answer is not None:
                    peer.send(between.Reply(number, msgspec.Raw(msgspec.msgpack.encode(answer))))
            case _:
                raise ValueError(f"nobody says {type(message).__name__} before Join")

    def _describe(self, peer: Connection, asked: between.Inquire) -> None:
        machines = self._coordinator.journal.machines
        number = self._number_of(asked.identity)
        if number is None:
            number = max(machines) + 1
            machines[number] = Machine(
                asked.name, asked.identity, asked.places or self._job.share_of_places, here=False
            )
            self._coordinator.save()
        peer.send(between.Described(number, self._run, self._job.encode(), self._store))

    def _number_of(self, identity: str) -> int | None:
        machines = self._coordinator.journal.machines
        return next((number for number, machine in machines.items() if machine.identity == identity), None)

    def _admit(self, peer: Connection, identity: str, going: bool) -> None:
        number = self._number_of(identity)
        if number is None:
            peer.send(between.TurnedAway("this run does not know the machine: start `paceline agent --join` anew"))
            return
        self._hang_up_on(number)  # its agent before: another one speaks for it now
        self._machine_of[peer] = number
        self._heard[number] = time.monotonic()
        self._send_journal([peer])
        if not going:
            self._coordinator.machine_came(number)

    def _note(self, machine: int, report: between.Report) -> None:
        """What has changed there since the last report."""
        coordinator, journal = self._coordinator, self._coordinator.journal
        for number, row in report.rows.items():
            if journal.homes.get(number) == machine and number not in journal.exits:
                self._board.copy_row(number, row)
        if report.main_ready:
            coordinator.main_is_ready()
        for number, pid in report.pids.items():
            if journal.homes.get(number) == machine and number not in journal.exits:
                coordinator.worker_started(number, pid)
        for number, end in report.exits.items():
            if journal.homes.get(number) == machine:
                coordinator.worker_ended(number, end)
        if report.going:
            coordinator.machine_goes(machine)
        for number in report.leaving:
            if journal.homes.get(number) == machine:
                coordinator.leaves(number)

    def reaches(self, machine: int) -> bool:
        return machine in self._machine_of.values()

    def forget(self, peer: Connection) -> None:
        self._machine_of.pop(peer, None)

    def _hang_up_on(self, number: int) -> None:
        for peer in [peer for peer, machine in self._machine_of.items() if machine == number]:
            self.drop(peer)

    # what they are told

    def tell(self) -> None:
        """The journal has changed."""
        self._send_journal(list(self._machine_of))

    def _send_journal(self, peers: list[Connection]) -> None:
        if peers:
            told = between.Told(self._fence, self._coordinator.journal.encode())
            for peer in peers:
                peer.send(told)

    def hit(self, worker: int, signum: int) -> None:
        home = self._coordinator.journal.homes[worker]
        for peer, machine in self._machine_of.items():
            if machine == home:
                peer.send(between.Hit(worker, signum))

    # the clock

    def tick(self, now: float) -> list[str]:
        """Say that somebody leads; give up who was silent too long. In words, who was refused since the last time."""
        for peer in self._machine_of:
            peer.send(between.Told(self._fence))
        lease_s = self._job.settings.lease
        for number, heard in list(self._heard.items()):
            if now - heard > lease_s:
                del self._heard[number]
                self._coordinator.machine_went(number, f"was not heard of for {lease_s:g} s")
                self._hang_up_on(number)  # should it come back, it joins anew
        return super().tick(now)

    def end(self) -> None:
        """The run is over: the journal says so. Wait a moment until they hang up: were one hung up on with its last
        report unread, the kernel would reset the connection, and what it has not read either would be lost."""
        self.tell()
        deadline = time.monotonic() + _END_S
        while any(peer.ended is None for peer in self._machine_of) and time.monotonic() < deadline:
            for peer in self._machine_of:
                peer.flush()
                peer.receive()
            time.sleep(_LOOK_S)
