"""An agent that stands by, when there is nobody to stand by for."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from paceline.cluster.agent import start_agent
from paceline.cluster.job import Job
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import LocalStore
from paceline.folder import RunFolder


def test_a_standby_ends_if_its_leader_died_before_it_had_handed_over(tmp_path: Path) -> None:
    """Both agents were lost, and the third was just born: it has no board, and nobody will ever give it one."""
    folder = RunFolder.create(tmp_path, "it")
    Job("train.py", [], False, {"grace": 1.0}, str(tmp_path), []).write(folder)
    place = Rendezvous.create(folder)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with closing(LocalStore(place.store)) as store:
        store.lead(0, dead.pid)
        assert start_agent(folder, machine=0, first=False).wait(30) == 1
        store.remove(1)
    (told,) = (folder.parse(line) for line in folder.events.read_text().splitlines())
    assert told["event"] == "over" and "handed this machine over for 1 s" in told["why"]
