"""An agent: a process that leads a run, or speaks for its machine in one, or stands by. It never imports torch.

    python -m paceline.cluster.agent first|next MACHINE FOLDER

`paceline run` starts the first one, which leads; `paceline agent` that of a further machine, which follows;
each of them starts a standby. Agents have a session of their own: the terminal's death is not theirs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from paceline.cluster.crew import Crew
from paceline.cluster.election import Tenure, clock
from paceline.cluster.fleet import Fleet
from paceline.cluster.follower import Ended, Follower, MayLead
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal, Machine
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.leader import Leader
from paceline.cluster.node import Node, Replaced
from paceline.cluster.office import Office
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.seeking import Seeker, first_journal
from paceline.cluster.standby import Lead, Orphaned, stand_by
from paceline.cluster.store import FencedError, LocalStore, Store, StoreGone, open_store
from paceline.folder import RunFolder
from paceline.wires import wire
from paceline.wires.board import Board

REPLACEMENTS, SERVERS = 300, 100
"""How many workers, and servers, a run may start anew before it makes do with those it has."""
_DOOR = "door"


def start_agent(folder: RunFolder, machine: int, first: bool) -> subprocess.Popen[bytes]:
    """Its own session, its own log: it outlives whoever starts it."""
    which = "first" if first else "next"
    command = [sys.executable, "-P", "-m", "paceline.cluster.agent", which, str(machine), str(folder.path)]
    with open(folder.logs / f"agent{f'-{machine}' if machine else ''}.log", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def main(arguments: list[str], hire: type[Crew] = Crew) -> int:
    first, machine, folder = arguments[0] == "first", int(arguments[1]), RunFolder(Path(arguments[2]))
    job = Job.read(folder)
    assert job is not None, f"{folder.job} is not there"
    place = Rendezvous.of(folder, machine)
    local = LocalStore(place.store)
    if first:
        fence = local.lead(0, os.getpid())
        lead: Lead | None = Lead(local, fence, _first_kept(job, place, fence))
    else:
        try:
            lead = stand_by(place, local, job.settings.lease, job.settings.grace)
        except Orphaned as error:
            folder.event("over", str(error), machine=machine)
            return 1
    if lead is not None:
        node = Node(job, folder, place, lead, lambda: start_agent(folder, machine, first=False), hire)
        try:
            _Service(node, local).serve()
        except Replaced as error:
            folder.event("stepped down", str(error), fence=node.fence, machine=machine)
        except StoreGone as error:
            folder.event("over", str(error), machine=machine)
            node.crew.kill_all()
            node.leave(1)
        finally:
            node.close()
    return 0


def _first_kept(job: Job, place: Rendezvous, fence: int) -> Kept:
    kept, rows = Kept(), _first_server(job) + (job.servers and job.servers + SERVERS)
    board = Board.create(rows)
    board.leader = fence
    kept.keep(BOARD, os.dup(board.fd), rows)
    board.close()
    if place.reach.host:  # the next agent of this machine listens at the same port
        kept.keep(_DOOR, wire.listen_tcp(place.reach.host, place.reach.port).detach())
    return kept


def _first_server(job: Job) -> int:
    """Servers' numbers begin behind those of all workers that there may ever be."""
    return job.workers + job.spares + REPLACEMENTS


class _Service:
    """What an agent does for its machine: leads the run, or follows whoever does."""

    def __init__(self, node: Node, local: LocalStore) -> None:
        self._node, self._local = node, local
        self._job, self._reach = node.job, node.place.reach
        self._door: socket.socket | None = None
        door = node.kept.get(_DOOR)
        if door is not None:
            self._door = socket.socket(fileno=os.dup(door[0]))
        self._far: Store | None = None
        """The store of a run that outlives any machine, once it was opened."""

    def serve(self) -> None:
        """Until the run ends, or this machine leaves it."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            self._serve()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _on_signal(self, signum: int, frame: object) -> None:
        self._node.told_to_go = True

    def _serve(self) -> None:
        if not self._reach.run:
            if self._node.number == 0:
                self._lead(Office(self._local, self._node.fence), self._local.read().state)
            else:
                self._follow()
            return
        after = self._vacated()
        while after is None or not self._try_to_lead(after):
            outcome = self._follow()
            if isinstance(outcome, Ended):
                return
            after = outcome.record.fence

    def _vacated(self) -> int | None:
        """The fence after which this agent may lead at once: nobody has led yet, or an agent of this machine that
        is known to be gone."""
        try:
            record = self._store.read()
        except OSError:
            return None
        mine = record.address == self._address or (record.fence == 0 and self._node.number == 0)
        return record.fence if mine else None

    @property
    def _store(self) -> Store:
        """OSError: it cannot be opened now."""
        self._far = self._far or open_store(self._job.settings.store, self._reach.run)
        return self._far

    @property
    def _address(self) -> str:
        """Where other machines reach this agent."""
        assert self._door is not None
        host, port = self._door.getsockname()[:2]
        return wire.tcp_address(host, port)

    def _try_to_lead(self, after: int) -> bool:
        """Whether this agent led the run to its end, or to this machine's leave."""
        sent = clock()
        try:
            fence = self._store.lead(after, os.getpid(), self._address)
            state = self._store.read().state
        except (FencedError, OSError):
            return False
        office = Office(self._store, fence, Tenure(self._job.settings.lease, sent), self._note_down)
        return self._lead(office, state)

    def _note_down(self, state: bytes) -> None:
        try:
            self._local.write(self._node.fence, state)
        except FencedError as error:
            raise Replaced(str(error)) from None

    def _lead(self, office: Office, state: bytes) -> bool:
        journal = Journal.decode(state) if state else self._first_journal()
        return Leader(self._node, office, journal, self._door).lead() is not None

    def _first_journal(self) -> Journal:
        job = self._job
        here = Machine(socket.gethostname(), self._reach.identity)
        if self._reach.host:
            here.places = job.share_of_places
        starts = 0 if job.dry_run else REPLACEMENTS
        machines = 1 if job.dry_run else job.settings.machines
        servers = range(_first_server(job), _first_server(job) + job.servers)
        journal = Journal.begin(job.workers, job.spares, starts, time.time(), here, machines, servers)
        journal.fleet = Fleet(job.servers, job.settings.replicas, min(starts, SERVERS))
        return journal

    def _follow(self) -> Ended | MayLead:
        place, reach, lease = self._node.place, self._reach, self._job.settings.lease
        state = self._local.read().state
        journal = Journal.decode(state) if state else first_journal(reach.leader, place.secret, reach.identity)
        seeker = Seeker(reach.leader, place.secret, self._job.settings.store, reach.run, lease)
        return Follower(self._node, self._note_down, journal, seeker, reach.identity).serve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
