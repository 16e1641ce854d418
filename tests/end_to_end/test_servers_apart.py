"""Servers on several machines: the same bits as all-reduce on one, whichever process or machine is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.launching import undisturbed
from tests.end_to_end.machines import SCRIPT, Spread, one_of_each, spread, summary_of
from tests.etcd import Etcd
from tests.network import Network

FLAGS = ("--slots", "8", "--lease", "1.5", "--servers", "2")
weights = undisturbed(SCRIPT, slots=8)


def servers_on(run: Spread, machine: int) -> dict[int, int]:
    """Servers that were started there and have not ended, with their processes."""
    events = run.lines("events.jsonl")
    ended = {event["server"] for event in events if event["event"] == "server ended"}
    return {
        event["server"]: event["pid"]
        for event in events
        if event["event"] == "server started" and event["machine"] == machine and event["server"] not in ended
    }


@pytest.mark.parametrize("strategy", ["ps", "ps+backup:1"])
def test_a_worker_and_a_server_are_killed_on_either_machine(
    tmp_path: Path, strategy: str, seed: int, weights: str
) -> None:
    dice = random.Random(seed)
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--strategy", strategy) as run:
        for machine in (1, 0):
            run.wait_for_step(dice.randrange(1, 100) + 100 * (1 - machine))
            victim, (server, pid) = dice.choice(sorted(run.workers_on(machine))), *servers_on(run, machine).items()
            print(f"worker {victim} and server {server} of machine {machine}")
            os.kill(pid, signal.SIGKILL)
            run.kill(victim)
            run.wait_for(run.event("joined", machine=machine), "a worker in its place")
            run.wait_for(lambda: servers_on(run, machine), "a server in its place")  # noqa: B023
            run.wait_for(run.event("settled"), "two copies")
        assert summary_of(run)["weights_sha256"] == weights
    one_of_each(run)
