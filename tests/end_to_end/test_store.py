"""A run whose decisions are in etcd: any machine may be lost, the first one too."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

from tests.end_to_end.launching import COMMAND, finish, paceline, undisturbed
from tests.end_to_end.machines import SCRIPT, one_of_each, spread, start, summary_of
from tests.etcd import Etcd

FLAGS = ("--slots", "8", "--lease", "1.5")
weights = undisturbed(SCRIPT, slots=8)


def test_the_first_machine_is_lost(tmp_path: Path, seed: int, weights: str, etcd: Etcd) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(random.Random(seed).randrange(1, 90))
        run.kill_machine(0)
        led = run.wait_for_event("leading")
        assert led["machine"] == 1
        run.wait_for_event("machine", machine=0)
        summary = summary_of(run)
    assert summary["weights_sha256"] == weights and summary["coordinators_lost"] == 1
    assert one_of_each(run) == [2]


def test_the_agent_that_leads_is_killed(tmp_path: Path, weights: str, etcd: Etcd) -> None:
    """Its machine's standby has seen it die, and need not wait for a lease."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        run.wait_for(lambda: len(run.agents_of(0)) == 2, "its standby")
        os.kill(run.speakers()[0], signal.SIGKILL)
        led = run.wait_for_event("leading")
        assert led["machine"] == 0
        assert summary_of(run)["weights_sha256"] == weights
    assert one_of_each(run) == [2]


def test_a_run_without_its_first_machine_is_scaled_watched_and_stopped(tmp_path: Path, etcd: Etcd) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        run.kill_machine(0)
        done = paceline("scale", "it", "-n", "1", cwd=tmp_path)  # before anybody leads in its place
        assert done.returncode == 0, done.stderr
        run.wait_for_event("leading")
        run.wait_for_event("worker ended", exit_code=0)
        viewer = start([*COMMAND, "attach", "it"], tmp_path, None, 0)
        try:
            run.wait_for_board(viewer.pid)
            assert paceline("stop", "it", cwd=tmp_path).returncode == 0
            finish(run)
            _, shown = viewer.communicate(timeout=60)
        finally:
            viewer.kill()
        assert run.agents[0].wait(60) == viewer.returncode == 0
    assert "weights" in shown
    assert "paceline stop" in json.loads((run.folder / "summary.json").read_text())["exit"]


def test_the_machine_that_leads_is_told_to_go(tmp_path: Path, weights: str, etcd: Etcd) -> None:
    """Its workers go at a step's end, main among them; another machine leads then, with all in hand."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        os.kill(run.speakers()[0], signal.SIGTERM)
        assert run.wait_for_event("stepped down")["machine"] == 0
        assert run.process.wait(30) == 0
        assert run.wait_for_event("leading")["machine"] == 1
        os.kill(max(run.workers_on(1).items())[1], signal.SIGKILL)
        run.wait_for_event("joined")
        summary = summary_of(run)
    assert summary["weights_sha256"] == weights and summary["recoveries"] == 1
    assert "coordinators_lost" not in summary, "it has handed the run on"
    ends = {e["worker"]: e["exit_code"] for e in run.lines("events.jsonl") if e["event"] == "worker ended"}
    assert (ends[0], ends[1]) == (0, 0)
    assert one_of_each(run) == [3], "fence 2 was nobody's"


def test_every_machine_is_told_to_go(tmp_path: Path, etcd: Etcd) -> None:
    """There is nobody to go on: the run stops."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        leads, follows = run.speakers()
        os.kill(follows, signal.SIGTERM)
        run.wait_for_event("leaving")
        os.kill(leads, signal.SIGTERM)
        assert run.process.wait(60) == 143
        run.agents[0].wait(60)
    assert "told to end (SIGTERM)" in json.loads((run.folder / "summary.json").read_text())["exit"]


def test_both_agents_of_the_first_machine_freeze(tmp_path: Path, weights: str, etcd: Etcd) -> None:
    """Another machine leads; when they thaw, they find that out and follow."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        with run.frozen_agents(0):
            assert run.wait_for_event("leading")["machine"] == 1
            run.wait_for(lambda: not run.workers_on(0), "the end of its workers")
        run.wait_for_event("stepped down")
        run.wait_for(lambda: len(run.workers_on(0)) == 2, "workers on the machine that is back")
        for worker in run.workers_on(0):
            run.wait_for_event("joined", worker=worker)
        assert summary_of(run)["weights_sha256"] == weights
    one_of_each(run)


def test_a_worker_dies_while_nobody_leads(tmp_path: Path, weights: str, etcd: Etcd) -> None:
    """On the machine whose agent leads next: it has seen that as one who followed."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        with run.frozen_agents(0):
            victim = max(run.workers_on(1))
            run.kill(victim)
            assert run.wait_for_event("leading")["machine"] == 1
            assert run.wait_for_event("worker ended", worker=victim)["exit_code"] == -9
        run.wait_for_event("joined", machine=1)
        assert summary_of(run)["weights_sha256"] == weights
    one_of_each(run)


def test_the_store_is_away_for_a_while(tmp_path: Path, weights: str) -> None:
    """Nobody leads meanwhile, and nobody needs to: the workers train on."""
    with Etcd() as etcd, spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--store", etcd.address) as run:
        run.wait_for_step(20)
        etcd.servers[0].freeze()
        step = max(line["step"] for line in run.lines("metrics.jsonl"))
        run.wait_for_event("stepped down")
        assert max(line["step"] for line in run.lines("metrics.jsonl")) > step
        etcd.servers[0].thaw()
        run.wait_for_event("leading")
        run.kill(max(run.workers_on(1)))
        run.wait_for_event("joined")
        assert summary_of(run)["weights_sha256"] == weights
    one_of_each(run)
