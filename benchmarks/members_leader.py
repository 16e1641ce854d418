"""The coordinator of benchmarks/members.py: the real agent, but for members that are no processes.

    members_leader.py FOLDER

A member lives until its number comes in on standard input; all are this process to whoever asks the kernel.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from typing import Any

from benchmarks.members_clients import raise_descriptors
from paceline.cluster import agent
from paceline.cluster.crew import Crew, Worker
from paceline.cluster.rendezvous import Rendezvous
from paceline.launch.nursing import Fork


class Simulated(Crew):
    """Everything of a crew, the look at each member's state included, except that no signal is ever sent."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, lambda _: self._read_deaths())

    def start(self, fork: Fork) -> None:
        self._take(Worker(fork.worker, os.getpid(), os.pidfd_open(os.getpid())))

    def _read_deaths(self) -> None:
        numbers = os.read(sys.stdin.fileno(), 1 << 16)
        if not numbers:  # whoever measures has gone; without a store there is nothing to take over for the standby
            Rendezvous.of(self._folder).store.unlink()
            os._exit(1)
        for number in numbers.split():
            self._ended(int(number), -signal.SIGKILL)

    def kill(self, number: int) -> None:
        self._ended(number, -signal.SIGKILL)

    def kill_group(self, worker: Worker) -> None:
        """It is this process's own."""

    def signal(self, number: int, signum: int) -> None:
        """As above."""


if __name__ == "__main__":
    raise_descriptors()
    sys.exit(agent.main(["first", "0", sys.argv[1]], Simulated))
