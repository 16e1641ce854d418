"""The coordinator dies, freezes or is followed by others; terminals come and go; the run does not care."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.launching import HEAD, Going, ended, finish, going, paceline, undisturbed

SCRIPT = (
    HEAD
    + """
import time
go = run.dir / "go"
run.prepare(model, optimizer, loader)
for epoch in run.epochs(50):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=0.0)
        # From here on it goes only as far as a change of its members needs, until it is let go.
        while run.step >= 100 and run.step % 10 == 0 and not run._session.board.next_term and not go.exists():
            time.sleep(0.001)
"""
)
weights = undisturbed(SCRIPT, slots=4)


def lead_on(run: Going) -> int:
    """Kill the leader; the process that leads then."""
    standby = run.wait_for_standby()
    os.kill(run.leader, signal.SIGKILL)
    run.wait_for(lambda: run.leader == standby, "the standby's lead")
    return standby


def test_three_leaders_in_a_row_and_a_worker_afterwards(tmp_path: Path, seed: int, weights: str) -> None:
    step = random.Random(seed).randrange(1, 90)
    print(f"from step {step} on")
    with going(tmp_path, SCRIPT, "-n", "3", "--slots", "4") as run:
        run.wait_for_step(step)
        for _ in range(3):
            lead_on(run)
        run.kill(1)
        run.wait_for(run.event("joined"), "a replacement")
        finish(run)
        result = ended(run)
    assert result.weights == weights
    leading = [event["fence"] for event in result.events() if event["event"] == "leading"]
    assert leading == [2, 3, 4]
    assert "the standby leads now" in result.err
    assert result.events()[-1]["event"] == "ended" and result.events()[-1]["exit_code"] == 0


def test_coordinator_and_worker_together(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "3", "--slots", "4") as run:
        run.wait_for_step(20)
        run.wait_for_standby()
        pid = run.event("worker started", worker=2)()
        assert pid is not None
        os.kill(run.leader, signal.SIGKILL)
        os.kill(pid["pid"], signal.SIGKILL)
        run.wait_for(run.event("joined"), "a replacement")
        finish(run)
        result = ended(run)
    assert result.weights == weights and result.summary["workers"] == 3
    assert "any process of this run may die" in result.err
    assert "from 1 lost worker, 1 lost coordinator" in result.err and "by the workers there at the end" in result.err
    recovered = next(event for event in result.events() if event["event"] == "recovered")
    assert "agreed" in recovered["why"] and recovered["term"] == 2


def test_the_death_of_a_spare_is_no_recovery(tmp_path: Path, weights: str) -> None:
    """It carried no slots. It is followed by another one, which then stands for a worker that did."""
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", "--spares", "1") as run:
        run.wait_for_step(10)
        run.kill(2)
        run.wait_for(run.event("worker started", worker=3), "another spare")
        run.kill(1)
        run.wait_for(run.event("joined"), "it, or the one that is started in its place")
        finish(run)
        result = ended(run)
    assert result.weights == weights and result.summary["recoveries"] == 1


def test_a_frozen_leader_is_followed_and_steps_down(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", "--lease", "0.5") as run:
        run.wait_for_step(20)
        run.wait_for_standby()
        frozen = run.leader
        os.kill(frozen, signal.SIGSTOP)
        run.wait_for(run.event("leading", fence=2), "the standby's lead")
        run.kill(0)
        run.wait_for(run.event("joined"), "a replacement")
        os.kill(frozen, signal.SIGCONT)
        run.wait_for(run.event("stepped down", fence=1), "the old leader's end")
        finish(run)
        result = ended(run)
    assert result.weights == weights


def test_ctrl_c_is_said_again_to_the_next_leader(tmp_path: Path) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", "--lease", "0.5") as run:
        run.wait_for_step(20)
        run.wait_for_standby()
        frozen = run.leader
        os.kill(frozen, signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        run.wait_for(run.event("stop asked for"), "the standby's answer")
        os.kill(frozen, signal.SIGCONT)
        run.wait_for(run.event("stepped down", fence=1), "the old leader's end")
        finish(run)
        assert ended(run).code == 130


def test_the_standby_and_the_nursery_are_replaced(tmp_path: Path, weights: str) -> None:
    faults = (
        "--fault",
        "kill nursery @step 20",
        "--fault",
        "kill standby @step 30",
        "--fault",
        "kill worker:1 @step 60",
    )
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", *faults) as run:
        run.wait_for(run.event("joined"), "a replacement")
        killed = run.wait_for(run.event("fault", why="kill standby @step 30"), "the kill")["time"]
        run.wait_for(
            lambda: [e for e in run.lines("events.jsonl") if e["event"] == "standby" and e["time"] > killed],
            "another standby",
        )
        finish(run)
        result = ended(run)
    assert result.weights == weights
    assert any(event["event"] == "nursery lost" for event in result.events())


@pytest.mark.long
def test_a_nursery_that_says_nothing_to_the_next_leader_is_replaced(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its address as long as it lives: the leader that started another one used to die of that."""
    monkeypatch.setenv("ITS_OWN", "nursery, and no stand-in of the tests that others end")
    with going(tmp_path, SCRIPT, "-n", "3", "--slots", "4", "--fault", "freeze nursery @step 20 for 600s") as run:
        run.wait_for(run.event("fault"), "the freeze")
        lead_on(run)
        run.wait_for(run.event("nursery lost"), "the end of the leader's patience")
        run.kill(1)
        run.wait_for(run.event("joined"), "a replacement")
        finish(run)
        assert ended(run).weights == weights


def test_a_frozen_worker_is_evicted_after_its_lease(tmp_path: Path, weights: str) -> None:
    flags = ("--lease", "0.5", "--fault", "freeze worker:1 @step 50 for 600s")
    with going(tmp_path, SCRIPT, "-n", "3", "--slots", "4", *flags) as run:
        run.wait_for(run.event("joined", worker=3), "a replacement")
        finish(run)
        result = ended(run)
    assert result.weights == weights
    evicted = next(event for event in result.events() if event["event"] == "evicted")
    assert evicted["worker"] == 1 and "frozen" in evicted["why"]
    assert "worker 1 was frozen for 0.5 s (--lease), and is ended" in result.err


def test_a_thawed_worker_changes_nothing_even_if_the_kill_came_too_late(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main, frozen inside a step: when it thaws it is alone with memory and files that are not its own any more."""
    monkeypatch.setenv("PACELINE_EVICT_WITHOUT_KILL", "1")
    with going(tmp_path, SCRIPT, "-n", "3", "--slots", "4", "--lease", "0.5") as run:
        run.wait_for_step(40)
        run.kill(0, by=signal.SIGSTOP)
        run.wait_for(run.event("joined", worker=3), "a replacement")
        run.wait_for_step(95)
        run.kill(0, by=signal.SIGCONT)
        thawed = run.wait_for(run.event("worker ended", worker=0), "the thawed worker's end")
        finish(run)
        result = ended(run)
    assert result.weights == weights and thawed["exit_code"] == 1
    steps = [line["step"] for line in run.lines("metrics.jsonl")]
    assert steps == sorted(set(steps)), "nobody wrote a step a second time"
    assert "taken for dead" in (result.folder / "logs" / "worker-0.log").read_text()


def test_a_worker_that_is_cut_off_trains_on(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", "--fault", "cut worker:1 @step 10 for 0.5s") as run:
        run.wait_for_step(95)
        finish(run)
        result = ended(run)
    assert result.weights == weights
    assert not [event for event in result.events() if event["event"] == "view"]


def test_the_terminal_dies_and_another_one_attaches(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4") as run:
        run.wait_for_step(10)
        run.process.kill()
        run.process.wait()
        finish(run)
        done = paceline("attach", "it", cwd=tmp_path)
    assert done.returncode == 0 and weights in done.stderr


def test_stop_and_resume(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4", "--checkpoint-every", "50") as run:
        run.wait_for_step(70)
        assert paceline("stop", "it", cwd=tmp_path).returncode == 0
        finish(run)
        result = ended(run)
    assert result.code == 0 and "paceline stop" in result.summary["exit"]
    assert "it can go on from its newest checkpoint: paceline resume it" in result.err
    resumed = paceline("resume", "it", "-n", "3", cwd=tmp_path)
    assert resumed.returncode == 0 and weights in resumed.stderr
    assert "is not running" in paceline("stop", "it", cwd=tmp_path).stderr


def test_without_any_agent_the_workers_train_on_and_then_stop_with_a_checkpoint(tmp_path: Path, weights: str) -> None:
    flags = ("-n", "2", "--slots", "4", "--grace", "1", "--checkpoint-every", "1000")
    until_alone = SCRIPT.replace("not go.exists()", "not go.exists() and run._session.board.silence_s < 1.2")
    with going(tmp_path, until_alone, *flags) as run:
        run.wait_for_step(20)
        standby, leader = run.wait_for_standby(), run.leader
        os.kill(standby, signal.SIGSTOP)  # so that it cannot start another one, nor take over
        os.kill(leader, signal.SIGKILL)
        os.kill(standby, signal.SIGKILL)
        stopped = run.wait_for(run.event("finished"), "the workers' stop")
        _, err = run.process.communicate()
    finish(run)
    assert "no coordinator for 1 s" in stopped["why"] and "no agent leads the run any more" in err
    resumed = paceline("resume", "it", cwd=tmp_path)
    assert resumed.returncode == 0 and weights in resumed.stderr, resumed.stderr


def test_scale_up_and_down_while_it_trains(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4") as run:
        run.wait_for_step(10)
        shown = paceline("show", "it", cwd=tmp_path).stdout
        assert re.search(rf"^coordinator +{run.leader} +0 +leads the run$", shown, re.MULTILINE), shown
        assert re.search(r"^worker 1 +\d+ +0 +the run begins$", shown, re.MULTILINE), shown
        assert re.search(r"^at +step \d\d+.*, epoch \d+, [\d,]+ samples; main is worker 0$", shown, re.MULTILINE), shown
        refused = paceline("scale", "it", "-n", "5", cwd=tmp_path)
        assert refused.returncode == 2 and "5 workers for 4 slots" in refused.stderr
        assert paceline("scale", "it", "-n", "4", cwd=tmp_path).returncode == 0
        for worker in (2, 3):  # in any order; who has not joined yet would be ended, and could not leave
            run.wait_for(run.event("joined", worker=worker), f"worker {worker}")
        assert paceline("scale", "it", "-n", "1", cwd=tmp_path).returncode == 0
        for worker in (1, 2, 3):
            run.wait_for(run.event("worker ended", worker=worker, exit_code=0), f"worker {worker}'s leave")
        finish(run)
        result = ended(run)
    assert result.weights == weights and result.summary["workers"] == 1
    assert "leads the run" not in paceline("show", "it", cwd=tmp_path).stdout


def test_sigterm_is_a_clean_leave(tmp_path: Path, weights: str) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4") as run:
        run.wait_for_step(10)
        run.kill(0, by=signal.SIGTERM)
        run.wait_for(run.event("worker ended", worker=0, exit_code=0), "worker 0's leave")
        run.wait_for(run.event("joined", worker=2), "a replacement")
        finish(run)
        result = ended(run)
    assert result.weights == weights


def test_sigterm_to_the_agent_of_the_only_machine_stops_the_run(tmp_path: Path) -> None:
    with going(tmp_path, SCRIPT, "-n", "2", "--slots", "4") as run:
        run.wait_for_step(10)
        os.kill(run.leader, signal.SIGTERM)
        run.wait_for(run.event("stop asked for"), "its answer")
        finish(run)
        result = ended(run)
    assert result.code == 143 and "told to end (SIGTERM)" in result.summary["exit"]
