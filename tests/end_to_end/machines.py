"""Runs on several machines. Here these are one: each has agents of its own, and they meet over loopback.

With a `Network` every machine is a network namespace, and its cables can be pulled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.store import LocalStore
from tests.end_to_end.launching import COMMAND, HEAD, PATIENCE_S, Going, environment, finish, write_script
from tests.forked import Popen
from tests.leaks import end_processes_of, processes_of

if TYPE_CHECKING:
    from tests.network import Network

SCRIPT = (
    HEAD
    + """
import time
go, coming = run.dir / "go", run.dir / f"coming-{run._session.worker}"
run.prepare(model, optimizer, loader)
if run._session.joining:
    coming.touch()
for epoch in run.epochs(45):
    for batch in loader:
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss.item())
        if coming.exists() and not run._session.joining:
            coming.unlink()
        # From here on it crawls, and only as far as a change of its members needs, until it is let go.
        while run.step >= 100 and not go.exists():
            if run._session.board.next_term or any(run.dir.glob("coming-*")):
                time.sleep(0.04)
                break
            time.sleep(0.001)
"""
)


class Spread(Going):
    """A run on several machines; the first one is where it was started."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], root: Path, network: Network | None) -> None:
        super().__init__(folder, process)
        self._root, self._network = root, network
        self.agents: list[subprocess.Popen[str]] = []

    def join(self, *flags: str) -> subprocess.Popen[str]:
        """A further machine comes."""
        address = self.wait_for(self.event("awaiting"), "the run's address")["address"]
        secret = str(self.folder / "secret")
        command = [*COMMAND, "agent", "--join", address, "--secret-file", secret, "--runs", "runs", *flags]
        agent = start(command, self._root, self._network, len(self.agents) + 1)
        self.agents.append(agent)
        return agent

    def wait_for_line(self, step: int) -> None:
        self._wait(lambda: any(line["step"] >= step for line in self.lines("metrics.jsonl")), f"step {step}")

    def wait_for_event(self, name: str, **fields: Any) -> dict[str, Any]:
        return dict(self._wait(self.event(name, **fields), f"{name} {fields}"))

    def wait_for_board(self, viewer: int) -> None:
        """Until this process has been lent one: it watches."""
        fds = Path(f"/proc/{viewer}/fd")
        self._wait(lambda: any("memfd:" in os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink()), "its board")

    def _wait(self, what: Callable[[], Any], words: str) -> Any:
        """The terminal may be gone with its machine: this waits for what should come, alone."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            assert time.monotonic() < deadline, f"{words} has not come: {self.lines('events.jsonl')}"
            time.sleep(0.005)
        return found

    def every(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.lines("events.jsonl") if {"event": name, **fields}.items() <= e.items()]

    def workers_on(self, machine: int) -> dict[int, int]:
        """Workers that were started there and have not ended, with their processes."""
        return self._on(machine, "worker")

    def servers_on(self, machine: int) -> dict[int, int]:
        return self._on(machine, "server")

    def _on(self, machine: int, role: str) -> dict[int, int]:
        events = self.lines("events.jsonl")
        ended = {event[role] for event in events if event["event"] == f"{role} ended"}
        return {
            event[role]: event["pid"]
            for event in events
            if event["event"] == f"{role} started" and event["machine"] == machine and event[role] not in ended
        }

    def agents_of(self, machine: int) -> list[int]:
        """The agents of a machine, the one that speaks for it and its standby, in no order."""
        mark = f"\0{machine}\0{self.folder}".encode()
        return [pid for pid in processes_of(self.folder) if mark in _command_of(pid)]

    def speakers(self) -> list[int]:
        """For each machine, the agent that has it in hand."""
        found = []
        for path in sorted(self.folder.glob("agent*.json"), key=lambda path: (len(path.name), path.name)):
            with contextlib.closing(LocalStore(Path(json.loads(path.read_text())["store"]))) as store:
                found.append(store.read().pid)
        return found

    def kill_machine(self, machine: int) -> None:
        """Everything on it at once, as if its power were cut. It is stopped first: else a standby that sees its leader go
        starts another before it goes itself."""
        stopped: set[int] = set()
        while new := self._processes_on(machine) - stopped:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if machine:
            self.agents[machine - 1].kill()  # the command that waits there for the run's end

    def _processes_on(self, machine: int) -> set[int]:
        log = f"nursery-{machine}.log" if machine else "nursery.log"
        rest = [pid for pid in processes_of(self.folder) if log.encode() in _command_of(pid)]
        trained = (*self.workers_on(machine).values(), *self.servers_on(machine).values())
        return {*self.agents_of(machine), *rest, *trained}

    @contextmanager
    def frozen_agents(self, machine: int) -> Iterator[None]:
        """Both of them, as if the machine slept; its workers do not."""
        self.wait_for(lambda: len(self.agents_of(machine)) == 2, "its standby")
        frozen = self.agents_of(machine)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        yield
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def summary_of(run: Spread) -> dict[str, Any]:
    """Let go, once the agents of the machines that are left have ended; the terminal may have died with the first one."""
    finish(run)
    for agent in run.agents:
        assert agent.wait(60) == 0
    return dict(json.loads((run.folder / "summary.json").read_text()))


def one_of_each(run: Spread) -> list[int]:
    """Never two leaders under one fence, never two views in one term; the fences."""
    events = run.lines("events.jsonl")
    fences = [event["fence"] for event in events if event["event"] == "leading"]
    terms = [event["term"] for event in events if event["event"] == "view"]
    assert len(set(fences)) == len(fences) and len(set(terms)) == len(terms), (fences, terms)
    return fences


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start(command: list[str], folder: Path, network: Network | None, machine: int) -> subprocess.Popen[str]:
    popen = Popen if network is None else network.machines[machine].popen
    return popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def spread(
    folder: Path,
    script: str,
    machines: int,
    *flags: str,
    args: tuple[str, ...] = (),
    network: Network | None = None,
) -> Iterator[Spread]:
    """A run named `it` on so many machines, which have all joined."""
    path = write_script(folder, script)
    host = network.machines[0].address if network is not None else "127.0.0.1"
    several = ["--machines", str(machines), "--listen", host]
    command = [*COMMAND, "run", "--runs", "runs", "--name", "it", *several, *flags, str(path), *args]
    process = start(command, folder, network, 0)
    run = Spread(folder / "runs" / "it", process, folder, network)
    try:
        for number in range(1, machines):
            run.join()
            run.wait_for_event("machine", machine=number)  # numbers are given in the order of coming
        yield run
    finally:
        if process.poll() is None or any(agent.poll() is None for agent in run.agents):
            end_processes_of(folder, grace_s=5.0)
        for one in (process, *run.agents):
            one.communicate()
