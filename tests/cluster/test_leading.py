"""Three machines, each with an etcd server and an agent that would lead: the leader's machine is cut off."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from paceline.cluster.etcd import EtcdStore
from paceline.cluster.store import open_store
from tests.etcd import Etcd
from tests.network import Machine, Network

pytestmark = pytest.mark.needs_root
_LEASE_S = 3.0
_DEADLINE_S = 40.0


class Candidate:
    """What one of them says."""

    def __init__(self, machine: Machine, *arguments: str) -> None:
        self.machine, self._rest = machine, b""
        self.lines: list[tuple[str, int, float]] = []
        command = [sys.executable, "-m", "tests.cluster.candidate", *arguments, str(_LEASE_S)]
        self._process = machine.popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.out = self._process.stdout

    def hear(self) -> None:
        *lines, self._rest = (self._rest + os.read(self.out.fileno(), 1 << 16)).split(b"\n")
        for line in lines:
            what, fence, *when = (
                line.decode().replace("steps down", "steps-down").replace("is fenced", "is-fenced").split()
            )
            self.lines.append((what, int(fence), float(when[0]) if when else 0.0))


def _wait(candidates: list[Candidate], what: str, fence: int) -> tuple[Candidate, float]:
    """Until one of them says this; who, and the time it names."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        for candidate in candidates:
            for said in candidate.lines:
                if said[:2] == (what, fence):
                    return candidate, said[2]
        ready, _, _ = select.select([candidate.out for candidate in candidates], [], [], deadline - time.monotonic())
        assert ready, f"nobody said {what} {fence}: {[candidate.lines for candidate in candidates]}"
        for candidate in candidates:
            if candidate.out in ready:
                candidate.hear()


@contextmanager
def _three() -> Iterator[tuple[Network, Etcd, str]]:
    with (
        Network(3) as network,
        Etcd(3, [m.address for m in network.machines], [m.popen for m in network.machines]) as etcd,
    ):
        with network.machine(1).inside():
            store = EtcdStore.create(etcd.address, "r")
            store.close()
        yield network, etcd, store.run


@pytest.mark.parametrize("with_etcds_leader", [True, False])
def test_a_leader_that_is_cut_off_steps_down_before_another_leads(with_etcds_leader: bool) -> None:
    with _three() as (network, etcd, run):
        with network.machine(1).inside():
            etcds = etcd.servers.index(etcd.leader())
        first = network.machines[etcds if with_etcds_leader else (etcds + 1) % 3]
        old = Candidate(first, etcd.address, run)
        _wait([old], "leads", 1)
        others = [Candidate(machine, etcd.address, run) for machine in network.machines if machine is not first]
        first.cut()
        new, asked = _wait(others, "leads", 2)
        _, acted = _wait([old], "steps-down", 1)
        assert acted < asked, f"it acted {acted - asked:.3f} s after another had asked for the lead"
        assert not any(what == "is-fenced" for what, *_ in old.lines), "it was cut off: it cannot know"
        first.mend()
        _wait([old], "is-fenced", 1)
        with new.machine.inside(), closing(open_store(etcd.address, run)) as store:
            assert store.read().fence == 2
        assert [said[:2] for candidate in others for said in candidate.lines] == [("leads", 2)], "it leads still"
        for candidate in (old, *others):
            candidate.out.close()
