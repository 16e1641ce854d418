"""Three machines with cables: one is pulled. The side that reaches the store goes on, the other one waits, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.launching import undisturbed
from tests.end_to_end.machines import SCRIPT, Spread, one_of_each, spread, summary_of
from tests.etcd import Etcd
from tests.network import Network

pytestmark = pytest.mark.needs_root
FLAGS = ("-n", "3", "--slots", "6", "--lease", "3")
weights = undisturbed(SCRIPT, slots=6)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture
def store(network: Network) -> Iterator[str]:
    """An etcd server on every machine."""
    hosts, popens = [m.address for m in network.machines], [m.popen for m in network.machines]
    with Etcd(3, hosts, popens, ["--pre-vote"]) as etcd:
        yield etcd.address


def wait_until_back(run: Spread, machine: int) -> None:
    """Its worker was given up; another one has joined from there."""
    run.wait_for_event("machine", machine=machine, why=f"machine {machine} (vm) is here, with places for 1 workers")
    run.wait_for_event("joined", machine=machine)


@pytest.mark.parametrize("machine", [0, 2])
def test_a_machine_is_cut_off(tmp_path: Path, machine: int, weights: str, network: Network, store: str) -> None:
    """The one that leads, or another."""
    with spread(tmp_path, SCRIPT, 3, *FLAGS, "--store", store, network=network) as run:
        run.wait_for_step(10)
        step = max(line["step"] for line in run.lines("metrics.jsonl"))
        network.machines[machine].cut()
        lost = run.wait_for_event("view", term=2)
        assert machine not in [event["machine"] for event in run.lines("events.jsonl") if event["event"] == "leading"]
        assert lost["workers"] == [worker for worker in range(3) if worker != machine]
        run.wait_for_line(step + 20)
        network.machines[machine].mend()
        wait_until_back(run, machine)
        assert summary_of(run)["weights_sha256"] == weights
    assert one_of_each(run) == ([2] if machine == 0 else [])
