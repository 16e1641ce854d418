"""An agent: a process that leads the run, or stands by to lead it. It never imports torch.

    python -m paceline.cluster.agent [--first] FOLDER

`paceline run` starts the first one, which leads; each leader starts a standby. Agents have a session of
their own: the terminal's death is not theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from paceline.cluster.board import Board
from paceline.cluster.crew import Crew
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.leader import Leader
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.standby import Lead, stand_by
from paceline.cluster.store import LocalStore, Store
from paceline.watch.folder import RunFolder

REPLACEMENTS = 100
"""How many workers a run may start anew before it makes do with those it has."""


def start_agent(folder: RunFolder, first: bool) -> subprocess.Popen[bytes]:
    """Its own session, its own log: it outlives whoever starts it."""
    command = [sys.executable, "-m", "paceline.cluster.agent", *(["--first"] if first else []), str(folder.path)]
    with open(folder.logs / "agent.log", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def main(arguments: list[str], hire: type[Crew] = Crew) -> int:
    first, folder = arguments[0] == "--first", RunFolder(Path(arguments[-1]))
    job = Job.read(folder)
    assert job is not None, f"{folder.job} is not there"
    place = Rendezvous.of(folder)
    store = LocalStore(place.store)
    if first:
        lead: Lead | None = Lead(store, store.lead(0, os.getpid()), _first_kept(job))
    else:
        lead = stand_by(place, store, job.settings.lease)
    if lead is not None:
        journal = _journal(job, store)
        Leader(job, folder, place, lead, journal, lambda: start_agent(folder, first=False), hire).lead()
    return 0


def _first_kept(job: Job) -> Kept:
    kept, rows = Kept(), job.workers + job.spares + REPLACEMENTS
    board = Board.create(rows)
    kept.keep(BOARD, os.dup(board.fd), rows)
    board.close()
    return kept


def _journal(job: Job, store: Store) -> Journal:
    """Where the last leader stopped; a fresh one, if it had not begun."""
    state = store.read().state
    starts = 0 if job.dry_run else REPLACEMENTS
    return Journal.decode(state) if state else Journal.begin(job.workers, job.spares, starts, time.monotonic())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
