"""Where a run's agents are found from a folder that several machines share."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import LocalStore
from paceline.errors import UsageError
from paceline.folder import RunFolder


def test_whoever_is_served_here_is_found(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "it")
    with pytest.raises(UsageError, match="'it' is not running"):
        Rendezvous.here(folder)
    lost, mine, elsewhere = (Rendezvous.create(folder, machine) for machine in (0, 2, 12))
    assert folder.machines() == [0, 2, 12]
    elsewhere.store.unlink()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    with closing(LocalStore(lost.store)) as store:
        store.lead(0, dead.pid)
    dead.communicate()
    assert Rendezvous.here(folder) == lost, "its standby may be on the way"
    with closing(LocalStore(mine.store)) as store:
        store.lead(0, os.getpid())
    assert Rendezvous.here(folder) == mine
