"""Faults on servers: who is hit, what the run says of it, and that its bits stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, launch, paceline
from tests.end_to_end.test_failures import left_processes

TRAINS = HEAD + BODY.replace("epochs(2)", "epochs(16)")
PS = ("-n", "2", "--strategy", "ps", "--servers", "2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
    """Of a run without servers."""
    return alone(tmp_path_factory.mktemp("reference"), TRAINS, slots=2).weights


def test_a_server_dies_with_the_coordinator_and_its_second_fault_is_passed_over(tmp_path: Path, weights: str) -> None:
    plan = ("kill server:0 @step 12", "kill coordinator @step 12", "kill server:0 @step 45")
    done = launch(tmp_path, TRAINS, *PS, *(word for fault in plan for word in ("--fault", fault)))
    assert done.summary["weights_sha256"] == weights, done.err
    told = [(event["why"], event.get("server")) for event in done.events() if event["event"] == "fault"]
    assert told == [(plan[0], 0), (plan[1], None), (f"{plan[2]}: passed over, server 0 is gone", 0)]
    ends = [event["server"] for event in done.events() if event["event"] == "server ended"]
    assert ends[0] == 0 and sorted(ends) == [0, 1, 2], "another one came in its place"
    assert (done.summary["servers_lost"], done.summary["coordinators_lost"]) == (1, 1)
    shown = paceline("show", "it", cwd=tmp_path).stdout
    assert "from 1 lost server, 1 lost coordinator" in shown
    assert "3 servers, 1 of them lost" in shown
    (failover,) = [line for line in shown.splitlines() if line.startswith("server 0 ")]
    assert re.fullmatch(r"server 0  +[\d.]+ s +\+[\d.]+ s +server 2 \+[\d.]+ s +(\+[\d.]+ s|-)", failover), failover


def test_a_server_that_is_frozen_for_longer_than_its_lease_is_evicted(tmp_path: Path, weights: str) -> None:
    done = launch(tmp_path, TRAINS, *PS, "--lease", "0.5", "--fault", "freeze server:1 @step 30 for 30s")
    assert done.weights == weights
    (evicted,) = [event for event in done.events() if event["event"] == "evicted"]
    assert (evicted["server"], evicted["why"]) == (1, "it was frozen for 0.5 s") and "worker" not in evicted


def test_a_fault_for_servers_needs_some(tmp_path: Path) -> None:
    done = launch(tmp_path, TRAINS, "-n", "2", "--fault", "kill server:0 @step 3")
    assert done.code == 2 and done.last_line.endswith("this run has no servers; pass --strategy ps --servers 2")
    assert not done.folder.exists()


LOSES_ALL = ("-n", "2", "--strategy", "ps", "--fault", "kill server:0 @step 30")


@pytest.mark.parametrize("flags", [("--servers", "1"), ("--servers", "2", "--replicas", "1")])
def test_the_only_copy_is_lost_without_a_checkpoint(tmp_path: Path, flags: tuple[str, ...], weights: str) -> None:
    done = launch(tmp_path, TRAINS, *LOSES_ALL, *flags)
    assert done.weights == weights
    cure = "--servers 2" if "1" in flags[:2] else "--replicas 2"
    assert f"after a server's death it begins again from the start ({cure} spares it that)" in done.err
    lost = "server 0 was killed by SIGKILL, and no other server had a copy of all that it held"
    assert f"{lost}; the run has no checkpoint, and begins again from its start" in done.err
    assert "goes back to its newest checkpoint" not in done.err
    last = done.summary["steps_redone"] - 1
    assert last >= 29
    assert f"the run has no checkpoint, and begins again: steps 0-{last} are trained again" in done.err
    assert left_processes(str(tmp_path)) == []


STANDS = TRAINS.replace(
    "        for x, y",
    """
        while run.step == 25 and not (run.dir / "checkpoints" / "step-00000021" / "manifest.json").exists():
            time.sleep(0.001)
        while run.step == 30 and run._session.worker < 2:  # until it is killed
            time.sleep(0.001)
        for x, y""",
).replace("import torch,", "import time\nimport torch,", 1)
"""It has exactly one checkpoint when the server is killed, at exactly this step."""


def test_the_only_copy_is_lost_and_a_checkpoint_is_there(tmp_path: Path, weights: str) -> None:
    done = launch(tmp_path, STANDS, *LOSES_ALL, "--servers", "1", "--checkpoint-every", "21")
    assert done.weights == weights and done.summary["rollbacks"] == 1
    (back,) = [event for event in done.events() if event["event"] == "rolled back"]
    assert (back["step"], back["redone"]) == (21, 9) and done.summary["steps_redone"] == 9
    assert "no other server had a copy of all that it held; the run goes back to its newest checkpoint\n" in done.err
    assert "the run goes on from its checkpoint of step 21: steps 21-29 are trained again" in done.err
    verified = paceline("verify", "it", cwd=tmp_path)
    assert verified.returncode == 0 and "every one of 96 samples exactly once" in verified.stdout, verified.stdout
