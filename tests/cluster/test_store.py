"""The stores: one leader at a time, nothing of an older one is taken, never two views in one term.

One contract, kept by the file of one machine and by the real etcd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster.journal import Failure, Journal
from paceline.cluster.membership import Publish, Start
from paceline.cluster.store import (
    FencedError,
    LocalStore,
    Store,
    StoreGone,
    TermTaken,
    create_store,
    file_system,
    open_store,
)
from paceline.errors import UsageError
from paceline.wires.view import View
from tests.etcd import Etcd


class Stores:
    """A run's store, opened as often as wanted."""

    def __init__(self, address: str, name: str) -> None:
        self.address = address
        self._opened = [create_store(address, name)]
        self.run = self._opened[0].run

    def open(self) -> Store:
        self._opened.append(open_store(self.address, self.run))
        return self._opened[-1]

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=["local", "etcd"])
def stores(request: pytest.FixtureRequest, etcd: Etcd, patient: None, tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(etcd.address, "r") if request.param == "etcd" else Stores("", str(tmp_path / "s.db"))
    yield stores
    stores.close()


def test_a_new_fence_shuts_the_old_leader_out(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    assert one.read().fence == 0
    assert one.lead(0, pid=11, address="a:1") == 1
    one.write(1, b"first", [View(1, (0, 1))])
    assert (two.read().pid, two.read().address) == (11, "a:1")
    assert two.lead(1, pid=22) == 2
    for late in (
        lambda: one.write(1, b"too late", [View(2, (0,))]),
        lambda: one.beat(1),
        lambda: one.lead(1, pid=11),
        lambda: one.remove(1),
    ):
        before = two.read()
        with pytest.raises(FencedError):
            late()
        assert two.read() == before
    assert (before.state, before.fence, before.pid, before.address) == (b"first", 2, 22, "")
    assert two.views() == [View(1, (0, 1))], "what an old leader wrote is not there, not even in part"


def test_of_two_standbys_one_leads(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    one.lead(0, pid=1)
    two.lead(1, pid=2)
    with pytest.raises(FencedError):
        one.lead(1, pid=2)  # the same number on another machine is another process


def test_never_two_views_in_one_term(stores: Stores) -> None:
    store = stores.open()
    store.lead(0, pid=1)
    store.write(1, b"a", [View(2, (0, 1)), View(3, (1,))])
    with pytest.raises(TermTaken, match="4, 2"):
        store.write(1, b"b", [View(4, (0,)), View(2, (0,))])
    assert store.read().state == b"a" and store.views() == [View(2, (0, 1)), View(3, (1,))]
    store.write(1, b"c", [View(10, ())])
    assert store.read().state == b"c" and store.views()[-1] == View(10, ())


def test_each_sign_of_life_is_another_beat(stores: Stores) -> None:
    leader, candidate = stores.open(), stores.open()
    fence, beats = leader.lead(0, pid=1), [candidate.read().beat]
    for sign in (lambda: leader.beat(fence), lambda: leader.write(fence, b"x"), lambda: leader.beat(fence)):
        sign()
        beats.append(candidate.read().beat)
    assert beats == sorted(set(beats))
    assert candidate.read() == candidate.read(), "a look is no beat"


def test_every_reader_sees_the_newest_state(stores: Stores) -> None:
    leader, reader = stores.open(), stores.open()
    leader.lead(0, pid=1)
    for state in (b"one", b"two", b"two", b"", bytes(range(256)) * 1000):
        leader.write(1, state)
        assert reader.read().state == state == reader.read().state == stores.open().read().state


def test_another_handle_goes_on_under_the_same_fence(stores: Stores) -> None:
    one, two = stores.open(), stores.open()
    one.lead(0, pid=1)
    one.write(1, b"a")
    two.beat(1)
    two.write(1, b"b", [View(1, (0,))])
    one.write(1, b"c", [View(2, (0,))])
    assert two.read().state == b"c" and [view.term for view in two.views()] == [1, 2]


def test_a_leader_killed_while_it_writes_leaves_whole_states(stores: Stores) -> None:
    code = (
        "import sys, os; from paceline.cluster.store import open_store\n"
        "store = open_store(*sys.argv[1:]); fence = store.lead(store.read().fence, os.getpid())\n"
        "for k in range(10**9): store.write(fence, bytes([k % 256]) * 20000); k or print('writing', flush=True)"
    )
    for lead in range(1, 4):
        writer = subprocess.Popen([sys.executable, "-c", code, stores.address, stores.run], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        found = stores.open().read()
        assert (found.fence, found.pid) == (lead, writer.pid)
        assert len(found.state) == 20000 and len(set(found.state)) == 1


def test_the_end_is_seen_by_all(stores: Stores) -> None:
    leader, candidate = stores.open(), stores.open()
    leader.lead(0, pid=1)
    leader.write(1, b"x", [View(1, (0,))])
    leader.remove(1)
    for late in (
        candidate.read,
        lambda: candidate.lead(1, pid=2),
        lambda: candidate.beat(1),
        lambda: candidate.write(1, b"y", [View(2, (0,))]),
        lambda: stores.open().read(),
    ):
        with pytest.raises(StoreGone, match="the run is over"):
            late()


def test_the_file_is_for_this_user_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    store = LocalStore.create(tmp_path / "s.db")
    assert (tmp_path / "s.db").stat().st_mode & 0o777 == 0o600
    store.lead(0, pid=1)
    store.remove(1)
    assert list(tmp_path.iterdir()) == []


def test_a_shared_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/dev/shm")) in ("tmpfs", "shm", "ramfs", "overlay", "ext4")
    monkeypatch.setattr("paceline.cluster.store.file_system", lambda path: "nfs4")
    with pytest.raises(UsageError, match=r"shared disk.*nfs4"):
        LocalStore(tmp_path / "s.db")


def test_a_ledger_survives_the_way_through_the_store() -> None:
    journal = Journal.begin(3, 0, 7, now=12.5)
    journal.enter(journal.membership.died(1, "was killed"))
    journal.exits[1], journal.failure = -9, Failure("worker 2:", "boom", "", 1, 2)
    assert Journal.decode(journal.encode()) == journal


def test_a_replacement_stands_in_the_place_of_the_lost() -> None:
    journal = Journal.begin(3, 0, 7, now=0.0)
    journal.exits[1] = -9
    fresh = journal.enter([Publish(View(2, (0, 2)), False, "x"), Start(3, "x")])
    assert fresh == [View(2, (0, 2))] and journal.places[3] == 1 and journal.running == [0, 2, 3]
    assert journal.after == {1: 2}
