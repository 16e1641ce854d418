"""Servers on several machines: the same bits as all-reduce on one, whichever process or machine is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.launching import ended, finish, paceline, undisturbed
from tests.end_to_end.machines import SCRIPT, Spread, one_of_each, spread, summary_of
from tests.etcd import Etcd
from tests.network import Network

FLAGS = ("--slots", "8", "--lease", "1.5", "--servers", "2")
weights = undisturbed(SCRIPT, slots=8)


def kill_a_worker_and_a_server(run: Spread, machine: int, dice: random.Random) -> None:
    """Of this machine, at once; until others have come in their place."""
    settled = len(run.every("settled"))
    victim, ((server, pid),) = dice.choice(sorted(run.workers_on(machine))), run.servers_on(machine).items()
    print(f"worker {victim} and server {server} of machine {machine}")
    joined = len(run.every("joined", machine=machine))
    os.kill(pid, signal.SIGKILL)
    run.kill(victim)
    run.wait_for(lambda: len(run.every("joined", machine=machine)) > joined, "a worker in its place")
    run.wait_for(lambda: run.servers_on(machine) and len(run.every("settled")) > settled, "a server in its place")


def test_the_same_bits_whichever_worker_server_or_machine_is_lost(tmp_path: Path, seed: int, weights: str) -> None:
    """When a machine is lost all copies are on the other one. As soon as there are two again, they are on both; and if one
    is told to go, its servers move away first."""
    dice = random.Random(seed)
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--strategy", "ps") as run:
        run.wait_for_step(dice.randrange(1, 45))
        kill_a_worker_and_a_server(run, 1, dice)
        run.wait_for_step(dice.randrange(45, 90))
        (lost,) = run.servers_on(1)
        run.kill_machine(1)
        run.wait_for(run.event("server ended", server=lost, why="was lost with machine 1"), "its loss")
        run.wait_for(lambda: len(run.servers_on(0)) == 2, "two servers on the first machine")
        run.join()
        run.wait_for(lambda: len(run.servers_on(2)) == 1 == len(run.servers_on(0)), "a server on each machine")
        for worker in run.workers_on(2):
            run.wait_for(run.event("joined", worker=worker), f"worker {worker}")
        run.agents[1].send_signal(signal.SIGTERM)
        assert run.agents[1].wait(60) == 0 and not run.servers_on(2) and not run.workers_on(2)
        finish(run)
        assert ended(run).weights == weights
    one_of_each(run)


def test_the_same_with_shares_that_are_computed_twice(tmp_path: Path, seed: int, weights: str) -> None:
    dice = random.Random(seed)
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS, "--strategy", "ps+backup:1") as run:
        for machine in (1, 0):
            run.wait_for_step(dice.randrange(1, 45) + 45 * (1 - machine))
            kill_a_worker_and_a_server(run, machine, dice)
        assert summary_of(run)["weights_sha256"] == weights
    one_of_each(run)


def reset_connections_to(pid: int) -> int:
    """All that lead to this process over TCP, as a router does that has forgotten them; how many there were."""
    listening = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
    ports = re.findall(rf":(\d+) .*pid={pid},", listening)
    count = 0
    for port in ports:
        reset = subprocess.run(["ss", "-HK", "dport", "=", f":{port}"], capture_output=True, text=True, check=True)
        count += len(reset.stdout.splitlines())
    return count


@pytest.mark.needs_root
@pytest.mark.parametrize("strategy", ["ps", "ssp:2"])
def test_connections_break_and_nobody_is_lost(tmp_path: Path, strategy: str, weights: str) -> None:
    """Those of workers to the other machine's server, and those between servers: they are made anew, and all is said again."""
    script, slots = (SCRIPT, "8") if strategy == "ps" else (SUMS, "4")
    with spread(tmp_path, script, 2, "-n", "4", *FLAGS, "--slots", slots, "--strategy", strategy) as run:
        for step in (15, 30, 45):
            run.wait_for_line(step)
            for machine in (0, 1):
                (server,) = run.servers_on(machine).values()
                assert reset_connections_to(server) > 0, "there is no connection to break"
        summary = summary_of(run)
    assert summary["exit"] == "finished" and summary["recoveries"] == 0, summary
    assert len(run.every("server started")) == 2
    if strategy == "ps":
        assert summary["weights_sha256"] == weights
    assert paceline("verify", "it", cwd=tmp_path).returncode == 0


SUMS = (Path(__file__).parents[2] / "benchmarks" / "sums.py").read_text()
SUMS = re.sub(
    r"^EPOCHS = .*$", "EPOCHS = 2", re.sub(r"^PAUSE_S = .*$", "PAUSE_S = 0.002", SUMS, flags=re.M), flags=re.M
)


def test_every_push_counts_once_whichever_process_or_machine_is_killed(tmp_path: Path, seed: int, etcd: Etcd) -> None:
    """The machine that leads, in the end."""
    dice = random.Random(seed)
    flags = ("-n", "4", *FLAGS, "--slots", "4", "--strategy", "ssp:2", "--store", etcd.address)
    with spread(tmp_path, SUMS, 2, *flags) as run:
        run.wait_for_line(10)
        os.kill(*run.servers_on(1).values(), signal.SIGKILL)
        run.kill(dice.choice(sorted(run.workers_on(0))))
        run.wait_for_event("settled")
        run.wait_for_line(40)
        run.kill_machine(0)
        assert run.wait_for_event("leading")["machine"] == 1
        summary = summary_of(run)
    assert summary["exit"] == "finished" and max(map(int, summary["staleness"])) <= 2, summary
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0, proven.stdout


@pytest.mark.needs_root
def test_a_machine_is_cut_off(tmp_path: Path, weights: str) -> None:
    """The one that leads, with main and a server. The others go on; when it is back, workers and a server of it are others."""
    with Network(3) as network:
        hosts, popens = [m.address for m in network.machines], [m.popen for m in network.machines]
        flags = ("-n", "3", "--slots", "8", "--lease", "3", "--servers", "3", "--strategy", "ps")
        with (
            Etcd(3, hosts, popens, ["--pre-vote"]) as etcd,
            spread(tmp_path, SCRIPT, 3, *flags, "--store", etcd.address, network=network) as run,
        ):
            run.wait_for_step(10)
            (before,) = run.servers_on(0)
            network.machines[0].cut()
            run.wait_for_event("server ended", server=before, why="was lost with machine 0")
            step = max(line["step"] for line in run.lines("metrics.jsonl"))
            run.wait_for_line(step + 20)
            network.machines[0].mend()
            run.wait_for_event("joined", machine=0)
            run.wait_for(lambda: [*run.servers_on(0)] not in ([], [before]), "a server on it")
            assert summary_of(run)["weights_sha256"] == weights
    assert one_of_each(run) == [2]
