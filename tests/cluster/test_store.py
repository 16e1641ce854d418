"""The store: one leader at a time, nothing of an older one is taken, never two views in one term."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.journal import Failure, Journal
from paceline.cluster.membership import Publish, Start, View
from paceline.cluster.store import FencedError, Store, file_system
from paceline.errors import UsageError


def test_a_new_fence_shuts_the_old_leader_out(tmp_path: Path) -> None:
    one, two = Store.create(tmp_path / "s.db"), Store(tmp_path / "s.db")
    assert one.lead(0, pid=11) == 1
    one.write(1, b"first", [View(1, (0, 1))])
    assert two.lead(1, pid=22) == 2
    with pytest.raises(FencedError):
        one.write(1, b"too late", [View(2, (0,))])
    assert (two.read().state, two.read().fence, two.read().pid) == (b"first", 2, 22)
    assert two.views() == [View(1, (0, 1))], "what an old leader wrote is not there, not even in part"
    one.close()
    two.close()


def test_of_two_standbys_one_leads(tmp_path: Path) -> None:
    one, two = Store.create(tmp_path / "s.db"), Store(tmp_path / "s.db")
    one.lead(0, pid=1)
    two.lead(1, pid=2)
    with pytest.raises(FencedError):
        one.lead(1, pid=3)
    one.close()
    two.close()


def test_never_two_views_in_one_term(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s.db")
    store.lead(0, pid=1)
    store.write(1, b"a", [View(2, (0, 1))])
    with pytest.raises(sqlite3.IntegrityError):
        store.write(1, b"b", [View(2, (0,))])
    assert store.read().state == b"a"
    store.close()


def test_a_leader_killed_while_it_writes_leaves_whole_states(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Store.create(path).close()
    code = (
        "import sys; from pathlib import Path; from paceline.cluster.store import Store\n"
        "store = Store(Path(sys.argv[1])); fence = store.lead(0, 1)\n"
        "for k in range(10**9): store.write(fence, bytes([k % 256]) * 20000); k or print('writing', flush=True)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        store = Store(path)
        state = store.read().state
        assert len(state) == 20000 and len(set(state)) == 1
        store.remove()
        Store.create(path).close()


def test_the_file_is_for_this_user_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s.db")
    assert (tmp_path / "s.db").stat().st_mode & 0o777 == 0o600
    store.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_shared_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/dev/shm")) in ("tmpfs", "shm", "ramfs", "overlay", "ext4")
    monkeypatch.setattr("paceline.cluster.store.file_system", lambda path: "nfs4")
    with pytest.raises(UsageError, match=r"shared disk.*nfs4"):
        Store(tmp_path / "s.db")


def test_a_ledger_survives_the_way_through_the_store() -> None:
    journal = Journal.begin(3, 0, 7, now=12.5)
    journal.enter(journal.membership.died(1, "was killed"))
    journal.exits[1], journal.failure = -9, Failure("worker 2:", "boom", "", 1, 2, 13.0)
    assert Journal.decode(journal.encode()) == journal


def test_a_replacement_stands_in_the_place_of_the_lost() -> None:
    journal = Journal.begin(3, 0, 7, now=0.0)
    journal.exits[1] = -9
    fresh = journal.enter([Publish(View(2, (0, 2)), False, "x"), Start(3, "x")])
    assert fresh == [View(2, (0, 2))] and journal.places[3] == 1 and journal.running == [0, 2, 3]
    assert journal.after == {1: 2}
