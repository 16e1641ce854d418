"""paceline agent"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.cluster import between
from paceline.cluster.job import Job
from paceline.cluster.rendezvous import Reach, Rendezvous
from paceline.cluster.store import LocalStore, StoreGone
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.launch.environment import visible_gpus
from paceline.wires import messages, secret, wire
from paceline.wires.link import LeaderLink

_VARIABLE = "PACELINE_SECRET"
_LOST_S = 6.0


@click.command("agent")
@click.option("--join", "where", required=True, metavar="HOST:PORT", help="Where the run's coordinator listens.")
@click.option("--secret-file", type=click.Path(path_type=Path), help=f"The run's secret.  [default: ${_VARIABLE}]")
@click.option("--places", type=int, default=0, help="Most workers on this machine.  [default: its share]")
@click.option("--listen", help="HOST at which other machines reach this one.  [default: as seen from the coordinator]")
@runs_option
def command(where: str, secret_file: Path | None, places: int, listen: str | None, runs: Path) -> int:
    """Take part in a run that was started on another machine with `paceline run --machines N`.

    \b
    paceline agent --join 10.0.0.1:7070 --secret-file secret

    Start one on each machine, with the script in the same place as on the first one. It ends with the run,
    and with the run's exit code. SIGTERM or Ctrl-C lets this machine's workers leave at a step's end; the run
    goes on without them. If it is led from here by then, another machine leads, if there is --store; else it stops.
    """
    from paceline.cluster.agent import start_agent

    known = secret.read(secret_file) if secret_file else secret.parse(os.environ.get(_VARIABLE, ""), f"${_VARIABLE}")
    address, identity = _address(where), secrets.token_hex(8)
    described, host = _inquire(address, known, between.Inquire(identity, socket.gethostname(), places))
    job = Job.decode(described.job)
    _go_to(job)
    folder = RunFolder(runs.absolute() / described.run)
    folder.logs.mkdir(parents=True, exist_ok=True)
    if not folder.job.exists():
        job.write(folder)
    gpus = tuple(visible_gpus()) if job.gpus else ()
    reach = Reach(identity, listen or host, 0, address, described.store)
    place = Rendezvous.create(folder, described.machine, gpus, reach, known)
    agent = start_agent(folder, described.machine, first=True)
    sys.stderr.write(f"paceline: this is machine {described.machine} of run {described.run}; logs in {folder.logs}\n")
    code = _Waiting(place, folder).wait()
    agent.poll()
    return code


def _address(where: str) -> str:
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--join {where!r} is no address: write HOST:PORT, as `paceline run` says it")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UsageError(f"--join {where}: {error.strerror}") from None
    return wire.tcp_address(str(found[0]), int(found[1]))


def _inquire(address: str, known: bytes, inquiry: between.Inquire) -> tuple[between.Described, str]:
    """What is to be run, and by which address this machine is seen from there."""
    try:
        with wire.connect(address, known) as sock:
            host = str(sock.getsockname()[0])
            wire.send(sock, inquiry)
            answer, _ = wire.receive(sock, between.FROM_LEADER)
    except OSError as error:
        raise UsageError(f"cannot join at {address}: {error}") from None
    if not isinstance(answer, between.Described):
        raise UsageError(f"cannot join at {address}: {getattr(answer, 'why', 'the run is over')}")
    return answer, host


def _go_to(job: Job) -> None:
    """Where the run was started, if this machine has the same folder."""
    if os.path.isdir(job.directory):
        os.chdir(job.directory)
    if not job.as_module and not os.path.exists(job.target):
        raise UsageError(
            f"{job.target} is not on this machine (looked in {os.getcwd()}): put it where the first one has it"
        )


class _Waiting:
    """In the foreground until the run ends: whoever started this wants to know."""

    def __init__(self, place: Rendezvous, folder: RunFolder) -> None:
        self._place, self._folder = place, folder
        self._link = LeaderLink(place.address, place.secret, messages.Watch(), place.fence, _LOST_S)

    def wait(self) -> int:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: self._pass_on())
        try:
            while True:
                if not self._link.connected:
                    wire.close_all(self._link.greet()[1])
                try:
                    message, fds = self._link.receive()
                except OSError:
                    self._link.close()
                    continue
                wire.close_all(fds)
                if isinstance(message, messages.Ended):
                    return message.exit_code
        except ConnectionError:
            sys.stderr.write(f"paceline: this machine's agents are gone; their last words are in {self._folder.logs}\n")
            return 1
        finally:
            self._link.close()

    def _pass_on(self) -> None:
        """To the agent that speaks for this machine: its workers leave at a step's end."""
        try:
            os.kill(LocalStore(self._place.store).read().pid, signal.SIGTERM)
        except (StoreGone, ProcessLookupError):
            return
