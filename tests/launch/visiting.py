"""For tests of the nursery: a client that waits for events, with a deadline."""

from __future__ import annotations

import os
import secrets
import select
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

from paceline.launch.environment import nursery_environment
from paceline.launch.nursing import Born, Event, Exited, Fork, Nursery

DEADLINE_S = 60.0
SECRET = bytes(range(32))
THREADS = 2
"""More than one: OpenBLAS then starts threads at its import, and must have none at a fork."""
_numbers = count()
"""Worker numbers; a nursery makes each only once."""
E = TypeVar("E", bound=Event)


def environment() -> dict[str, str]:
    return nursery_environment(os.environ, THREADS)


def new_address() -> str:
    return f"paceline-test-{secrets.token_hex(8)}"


@dataclass
class Visitor:
    """One connection. Events that nobody has waited for yet stay in `events`."""

    nursery: Nursery
    folder: Path
    events: list[Event] = field(default_factory=list)

    def wait(self, kind: type[E], worker: int | None = None) -> E:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events:
                if isinstance(event, kind) and worker in (None, getattr(event, "worker", None)):
                    self.events.remove(event)
                    return event
            assert select.select([self.nursery], [], [], deadline - time.monotonic())[0], f"no {kind.__name__} came"
            self.events += self.nursery.on_ready()

    def log(self, worker: int) -> Path:
        return self.folder / f"worker-{worker}.log"

    def ask(self, script: str, *arguments: str, environment: dict[str, str] | None = None, append: bool = False) -> int:
        """Have a worker run this script; its number."""
        worker = next(_numbers)
        path = self.folder / f"script_{worker}.py"
        path.write_text(textwrap.dedent(script))
        log = str(self.log(worker))
        self.nursery.ask(Fork(worker, environment or {}, log, append, [str(path), *arguments]))
        return worker

    def run(self, script: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        """The exit status of a worker with this script, and its log."""
        worker = self.ask(script, *arguments, environment=environment)
        os.close(self.wait(Born, worker).pidfd)
        return self.wait(Exited, worker).status, self.log(worker).read_text()

    def leave(self) -> None:
        for event in self.events:
            if isinstance(event, Born):
                os.close(event.pidfd)
        self.nursery.close()


@contextmanager
def visiting(nursery: Nursery, folder: Path) -> Iterator[Visitor]:
    visitor = Visitor(nursery, folder)
    try:
        yield visitor
    finally:
        visitor.leave()


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def wait_for_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "the process does not end"


def wait_in(fifo: Path) -> str:
    """A script that tells the test it has come this far, and waits for its word."""
    if not fifo.exists():
        os.mkfifo(fifo)
    return f"print(open({str(fifo)!r}).read())"
