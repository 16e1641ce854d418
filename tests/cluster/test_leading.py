"""Three machines, each with an etcd server and an agent that would lead: the leader's machine is cut off."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from paceline.cluster.etcd import EtcdStore
from tests.etcd import Etcd
from tests.network import Machine, Network

pytestmark = pytest.mark.needs_root
_LEASE_S = 3.0
_DEADLINE_S = 40.0


class Said(NamedTuple):
    what: str
    fence: int
    when: float


class Candidate:
    """What one of them says."""

    def __init__(self, machine: Machine, *arguments: str) -> None:
        self.machine, self._rest = machine, b""
        self.said: list[Said] = []
        command = [sys.executable, "-m", "tests.cluster.candidate", *arguments, str(_LEASE_S)]
        process = machine.popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        self.out = process.stdout

    def hear(self) -> None:
        *lines, self._rest = (self._rest + os.read(self.out.fileno(), 1 << 16)).split(b"\n")
        for line in lines:
            what, fence, when = line.decode().split(",")
            self.said.append(Said(what, int(fence), float(when)))


def _wait(candidates: list[Candidate], what: str, fence: int) -> Said:
    """Until one of them says this, of this fence or a later one."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        for said in (said for candidate in candidates for said in candidate.said):
            if said.what == what and said.fence >= fence:
                return said
        left_s = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([candidate.out for candidate in candidates], [], [], left_s)
        assert ready, f"nobody said that it {what} {fence}: {[candidate.said for candidate in candidates]}"
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
def test_a_leader_that_is_cut_off_steps_down_before_another_leads(patient: None, with_etcds_leader: bool) -> None:
    with _three() as (network, etcd, run):
        with network.machine(1).inside():
            etcds = etcd.servers.index(etcd.leader())
        first = network.machines[etcds if with_etcds_leader else (etcds + 1) % 3]
        old = Candidate(first, etcd.address, run)
        led = _wait([old], "leads", 1).fence
        others = [Candidate(machine, etcd.address, run) for machine in network.machines if machine is not first]
        first.cut()
        _wait(others, "leads", led + 1)
        over = _wait([old], "steps down", led).fence
        assert Said("is fenced", over, 0.0) not in old.said, "it is cut off: it cannot know"
        first.mend()
        _wait([old], "is fenced", over)
        everything = [said for candidate in (old, *others) for said in candidate.said]
        asked = {said.fence: said.when for said in everything if said.what == "leads"}
        assert len(asked) == max(asked), "each fence has one leader"
        for what, fence, acted in everything:
            if what == "steps down" and fence + 1 in asked:
                assert acted < asked[fence + 1], f"{fence} acted after {fence + 1} had asked for the lead"
        for candidate in (old, *others):
            candidate.out.close()
