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
    """`signal(worker, signum)` reaches a worker wherever it is."""

    def __init__(self, plan: Plan, node: Node, signal: Callable[[int, int], None]) -> None:
        self.plan, self._node, self._signal = plan, node, signal
        self._folder, self._crew, self._board, self._desk = node.folder, node.crew, node.board, node.desk

    @staticmethod
    def of(faults: list[str], state: dict[str, object]) -> Plan:
        return Plan.restore(state) if state else Plan(map(Fault.parse, faults))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            step = max(self._board.see(number).step for number in range(self._board.workers))
            self._folder.event("fault", action.why, worker=action.worker, step=step)
            if action.role == "worker":
                assert action.worker is not None
                self._hit_worker(action, action.worker)
            else:
                self._hit(action)

    def _hit_worker(self, action: Action, worker: int) -> None:
        match action.kind:
            case "kill" if worker in self._crew.numbers:
                self._crew.kill(worker)
            case "kill" | "stop" | "continue":
                self._signal(worker, _SIGNALS[action.kind])
            case "cut" | "mend":
                self._desk.cut(worker, action.kind == "cut")
            case "slow" | "unslow":
                self._board.slow_down(worker, action.factor or 1.0 if action.kind == "slow" else 1.0)

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
