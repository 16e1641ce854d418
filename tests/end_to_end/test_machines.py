"""One run on several machines: the same bits, whichever process or machine is lost."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.launching import COMMAND, Result, ended, finish, launch, paceline, undisturbed, write_script
from tests.end_to_end.machines import SCRIPT, Spread, one_of_each, spread, start

FLAGS = ("--slots", "8", "--lease", "1.5")
weights = undisturbed(SCRIPT, slots=8)


def completed(run: Spread) -> Result:
    finish(run)
    result = ended(run)
    for agent in run.agents:
        agent.wait(20)
    return result


@pytest.mark.parametrize(("workers", "machines"), [(2, 2), (4, 2), (5, 3)])
def test_the_same_bits_wherever_the_workers_are(tmp_path: Path, workers: int, machines: int, weights: str) -> None:
    with spread(tmp_path, SCRIPT, machines, "-n", str(workers), *FLAGS) as run:
        result = completed(run)
        assert [agent.returncode for agent in run.agents] == [0] * (machines - 1)
    assert result.weights == weights
    homes = [event["machine"] for event in result.events() if event["event"] == "worker started"]
    assert set(homes) == set(range(machines)) and max(map(homes.count, homes)) <= -(-workers // machines)
    assert "the run ends if" in result.err and "--store etcd://" in result.err


@pytest.mark.parametrize("machine", [0, 1])
def test_a_worker_is_killed(tmp_path: Path, machine: int, seed: int, weights: str) -> None:
    """Main among them; its machine starts another one, which is given the run's state over the network."""
    dice = random.Random(seed)
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(dice.randrange(1, 90))
        victim = dice.choice(sorted(run.workers_on(machine)))
        print(f"worker {victim}")
        run.kill(victim)
        joined = run.wait_for(run.event("joined"), "a replacement")["worker"]
        started = run.event("worker started", worker=joined)()
        assert started is not None and started["machine"] == machine
        result = completed(run)
    assert result.weights == weights
    one_of_each(run)


HELD = SCRIPT.replace(
    "        if coming.exists()",
    """
        while run._session.joining and (run.dir / "hold").exists():
            (run.dir / f"follows-{run._session.worker}").touch()
            time.sleep(0.001)
        if coming.exists()""",
)


def test_a_newcomers_donor_is_killed(tmp_path: Path, weights: str) -> None:
    """The newcomer gives up, which is no failure of the run, and others come in their place."""
    with spread(tmp_path, HELD, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(20)
        (run.folder / "hold").touch()
        first, donor = sorted(run.workers_on(1))
        run.kill(first)  # who comes for it will call the other one on its machine
        run.wait_for(lambda: list(run.folder.glob("follows-*")), "a newcomer that follows")
        newcomer = max(run.workers_on(1))
        run.kill(donor)
        run.wait_for(run.event("worker ended", worker=donor), "the donor's end")
        (run.folder / "hold").unlink()
        run.wait_for(run.event("worker ended", worker=newcomer, exit_code=75), "the newcomer's end")
        (run.folder / f"coming-{newcomer}").unlink()
        run.wait_for(lambda: len([e for e in run.lines("events.jsonl") if e["event"] == "joined"]) == 2, "two more")
        result = completed(run)
    assert result.weights == weights
    log = (run.folder / "logs" / f"worker-{newcomer}.log").read_text()
    assert re.search(
        r"OvertakenError: (the donor (is gone|has hung up)|worker \d, whom this newcomer followed)", log
    ), log
    one_of_each(run)


def test_a_machine_is_lost_and_another_one_comes(tmp_path: Path, seed: int, weights: str) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(random.Random(seed).randrange(1, 90))
        run.kill_machine(1)
        lost = run.wait_for(
            lambda: [e for e in run.lines("events.jsonl") if "was not heard of" in e["why"]], "its loss"
        )
        assert lost[0]["machine"] == 1
        run.join()
        run.wait_for(lambda: len(run.workers_on(2)) == 2, "workers on the new machine")
        for worker in run.workers_on(2):
            run.wait_for(run.event("joined", worker=worker), f"worker {worker}")
        result = completed(run)
        assert run.agents[1].returncode == 0
    assert result.weights == weights
    one_of_each(run)


def test_the_agents_of_either_machine_are_killed(tmp_path: Path, weights: str) -> None:
    """The one that leads and the one that follows, together; their standbys go on with the same workers."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(20)
        before = {**run.workers_on(0), **run.workers_on(1)}
        for machine in (0, 1):
            run.wait_for(lambda: len(run.agents_of(machine)) == 2, "its standby")  # noqa: B023
        speaking = [pid for machine in (0, 1) for pid in run.speakers() if pid in run.agents_of(machine)]
        assert len(speaking) == 2
        for pid in speaking:
            os.kill(pid, signal.SIGKILL)
        run.wait_for(run.event("leading"), "another coordinator")
        run.kill(max(run.workers_on(1)))  # that is heard of, too
        run.wait_for(run.event("joined"), "a replacement")
        kept = {**run.workers_on(0), **run.workers_on(1)}
        result = completed(run)
    assert result.weights == weights
    assert len(before.items() & kept.items()) == 3, "nobody else was started anew"
    one_of_each(run)


def test_both_agents_of_a_machine_freeze_and_thaw(tmp_path: Path, weights: str) -> None:
    """Its connection has survived all the same; it joins anew, and its workers are others."""
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(20)
        with run.frozen_agents(1):
            run.wait_for(lambda: not run.workers_on(1), "the end of its workers")
        run.wait_for(lambda: len(run.workers_on(1)) == 2, "workers on the machine that is back")
        for worker in run.workers_on(1):
            run.wait_for(run.event("joined", worker=worker), f"worker {worker}")
        result = completed(run)
    assert result.weights == weights
    one_of_each(run)


def test_ctrl_c_while_machines_are_waited_for(tmp_path: Path) -> None:
    path = write_script(tmp_path, SCRIPT)
    flags = ["--machines", "2", "--listen", "127.0.0.1", "-n", "2", "--runs", "runs", "--name", "it"]
    process = start([*COMMAND, "run", *flags, str(path)], tmp_path, None, 0)
    run = Spread(tmp_path / "runs" / "it", process, tmp_path, None)
    run.wait_for(run.event("awaiting"), "its address")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_machine_leaves_by_sigterm(tmp_path: Path, weights: str) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(20)
        run.agents[0].send_signal(signal.SIGTERM)
        run.wait_for(lambda: not run.workers_on(1), "its workers' end")
        result = completed(run)
    assert result.weights == weights
    codes = [e["exit_code"] for e in result.events() if e["event"] == "worker ended" and e["worker"] in (2, 3)]
    assert codes == [0, 0]


def test_stop_and_scale_from_where_it_was_started(tmp_path: Path, weights: str) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "4", *FLAGS) as run:
        run.wait_for_step(20)
        refused = paceline("scale", "--runs", "runs", "it", "-n", "8", cwd=tmp_path)
        assert refused.returncode == 2 and "places for 4" in refused.stderr
        assert paceline("scale", "--runs", "runs", "it", "-n", "2", cwd=tmp_path).returncode == 0
        run.wait_for(lambda: len(run.workers_on(0)) + len(run.workers_on(1)) == 2, "two workers")
        result = completed(run)
    assert result.weights == weights


def test_who_may_not_join(tmp_path: Path) -> None:
    with spread(tmp_path, SCRIPT, 2, "-n", "2", *FLAGS) as run:
        address = run.wait_for(run.event("awaiting"), "its address")["address"]
        run.wait_for_step(5)
        other = tmp_path / "other"
        other.write_text("00" * 32)
        other.chmod(0o600)
        wrong = paceline("agent", "--join", address, "--secret-file", str(other), cwd=tmp_path)
        assert wrong.returncode == 2 and "handshake failed" in wrong.stderr
        nowhere = paceline("agent", "--join", "127.0.0.1:1", "--secret-file", str(run.folder / "secret"), cwd=tmp_path)
        assert nowhere.returncode == 2 and "cannot join" in nowhere.stderr
        nothing = paceline("agent", "--join", address, cwd=tmp_path)
        assert nothing.returncode == 2 and "PACELINE_SECRET" in nothing.stderr
        completed(run)


def test_a_dry_run_waits_for_no_machine(tmp_path: Path) -> None:
    result = launch(tmp_path, SCRIPT, "-n", "4", "--machines", "2", "--listen", "127.0.0.1", "--dry-run")
    assert result.code == 0 and "machines" in result.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--machines", "2", "-n", "2"), "needs --listen"),
        (("--machines", "3", "-n", "2", "--listen", "127.0.0.1"), "3 machines for 2 workers"),
        (("--store", "etcd://127.0.0.1:2379"), "needs --listen"),
        (("--listen", "127.0.0.1", "--transport", "gloo"), "is for one machine"),
        (("--listen", "127.0.0.1", "--store", "zookeeper://x"), "etcd://"),
    ],
)
def test_mistakes(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    result = launch(tmp_path, SCRIPT, *flags)
    assert result.code == 2 and words in result.last_line
