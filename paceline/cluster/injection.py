"""Carrying out a plan of faults: the leader hits its own run, and itself. No torch in here."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from paceline.cluster.node import Node
from paceline.faults.plan import Action, Fault, Plan

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class Injection:
    """`signal(number, signum)` reaches a worker or a server wherever it is."""

    def __init__(self, plan: Plan, node: Node, signal: Callable[[int, int], None]) -> None:
        self.plan, self._node, self._signal = plan, node, signal
        self._folder, self._crew, self._board, self._desk = node.folder, node.crew, node.board, node.desk

    @staticmethod
    def of(faults: list[str], state: dict[str, object]) -> Plan:
        return Plan.restore(state) if state else Plan(map(Fault.parse, faults))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            step = max(self._board.see(number).step for number in range(self._board.workers))
            whom = {action.role: action.number} if action.number is not None else {}
            self._folder.event("fault", action.why, **whom, step=step)
            if action.number is None:
                self._hit(action)
            elif action.role == "server":
                self._hit_process(action, self._node.master.journal.servers[action.number])
            else:
                self._hit_process(action, action.number)

    def _hit_process(self, action: Action, number: int) -> None:
        """A worker or a server, by its number in the journal."""
        match action.kind:
            case "kill" if number in self._crew.numbers:
                self._crew.kill(number)
            case "kill" | "stop" | "continue":
                self._signal(number, _SIGNALS[action.kind])
            case "cut" | "mend":
                self._desk.cut(number, action.kind == "cut")
            case "slow" | "unslow":
                self._board.slow_down(number, action.factor or 1.0 if action.kind == "slow" else 1.0)

    def _hit(self, action: Action) -> None:
        match action.role, action.kind:
            case "coordinator" | "standby", "cut" | "mend":
                self._desk.cut(None, action.kind == "cut")
            case "coordinator", _:
                self._hit_self(action)
            case "standby", _:
                _send(self._node.standby_pid, action.kind)
            case "nursery", _:
                _send(self._crew.nursery_pid, action.kind)
            case "everything", _:
                for pid in [*self._crew.pids.values(), self._crew.nursery_pid, self._node.standby_pid]:
                    _send(pid, action.kind)
                self._hit_self(action)

    def _hit_self(self, action: Action) -> None:
        if action.kind == "stop":
            # Somebody must wake it: a frozen process cannot.
            waker = f"sleep {action.for_s}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", waker], start_new_session=True, stdin=subprocess.DEVNULL)
        _send(os.getpid(), action.kind)


def _send(pid: int, kind: str) -> None:
    if pid:
        try:
            os.kill(pid, _SIGNALS[kind])
        except ProcessLookupError:
            return
