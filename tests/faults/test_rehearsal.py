"""Rehearsals of real runs: judged, replayed, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.faults.judge import Outcome
from paceline.faults.marked import VARIABLE, end_marked, marked
from paceline.faults.plan import Fault
from paceline.faults.rehearsal import Rehearsal
from tests.end_to_end.launching import BODY, HEAD, environment, paceline, write_script
from tests.end_to_end.test_failures import left_processes

pytestmark = pytest.mark.usefixtures("warm")
TRAINS = HEAD + BODY.replace("epochs(2)", "epochs(40)").replace("zero_grad()", "zero_grad(); run.log(step=run.step)")


def test_two_random_plans_of_kills(tmp_path: Path) -> None:
    write_script(tmp_path, TRAINS)
    done = paceline(
        *("rehearse", "--seeds", "2", "--first-seed", "3", "-n", "3", "--slots", "6", "--jobs", "2"),
        *("--kinds", "kill", "--roles", "worker,main", "--most", "2", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("rehearse-*")
    reference = json.loads((folder / "reference" / "summary.json").read_text())
    assert reference["recoveries"] == 0
    table = done.stdout.splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [
        [seed, reference["weights_sha256"][:12], f"{reference['samples']:,}"] for seed in ("3", "4")
    ]
    assert re.match(r"2 plans, no violation, [1-4] of [2-4] faults carried out; stall median ", table[-1]), done.stdout
    verdicts = json.loads((folder / "rehearsal.json").read_text())["verdicts"]
    assert all(map(Fault.parse, verdicts[0]["faults"])) and [v["violations"] for v in verdicts] == [[], []]
    assert any(json.loads((folder / f"seed-{n}" / "summary.json").read_text())["recoveries"] for n in (3, 4))
    assert left_processes(str(tmp_path)) == []


LEAVES = TRAINS.replace("epochs(40)", "epochs(12)").replace(
    "run.log(step=run.step)", "run.log(step=run.step)\n        if run.step % 10 == 9: break"
)


def test_a_script_that_leaves_its_loops_is_held_against_itself(tmp_path: Path) -> None:
    """That epochs were not trained to their ends is no fault's doing."""
    write_script(tmp_path, LEAVES)
    done = paceline(
        *("rehearse", "--seeds", "1", "--first-seed", "3", "-n", "2", "--kinds", "kill", "--roles", "worker"),
        *("--most", "1", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not proven, with or without faults: reference: epoch" in done.stderr, done.stderr
    assert "1 plans, no violation, 1 of 1 faults" in done.stdout, done.stdout


def test_two_random_plans_with_servers(tmp_path: Path) -> None:
    """Kills and freezes of servers and of those who use them: the bits of the run without faults."""
    write_script(tmp_path, TRAINS)
    done = paceline(
        *("rehearse", "--seeds", "2", "--first-seed", "52", "-n", "2", "--slots", "4", "--jobs", "2"),
        *("--strategy", "ps", "--servers", "2", "--kinds", "kill,freeze", "--roles", "server,worker,coordinator"),
        *("--most", "3", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("rehearse-*")
    verdicts = json.loads((folder / "rehearsal.json").read_text())["verdicts"]
    assert all(any("kill server" in fault for fault in verdict["faults"]) for verdict in verdicts), verdicts
    assert "no violation" in done.stdout
    assert left_processes(str(tmp_path)) == []


MARK = "import os\nmark = os.environ['PACELINE_REHEARSAL']\n"
CHANGES = f"""{MARK}{HEAD}{BODY}
if mark.endswith("/seed-1"):
    with torch.no_grad():
        model[0].weight[0, 0] += 1
"""


def test_a_violation_ends_with_1_and_the_line_to_run_it_again(tmp_path: Path) -> None:
    write_script(tmp_path, CHANGES)
    done = paceline(
        *("rehearse", "--seeds", "1", "-n", "2", "--kinds", "kill", "--roles", "standby", "train.py", "--", "it's"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION: weights_sha256 " in done.stdout and "1 violation," in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  paceline run")]
    assert re.fullmatch(r"  paceline run -n 2 --fault 'kill standby @\w+ [\d.]+s?' train.py -- 'it'\"'\"'s'", line)


def test_a_script_that_fails_by_itself_is_not_rehearsed(tmp_path: Path) -> None:
    write_script(tmp_path, "raise ValueError('mine')")
    done = paceline("rehearse", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr
    assert done.stderr.splitlines()[-1] == "paceline: the run without faults failed (see above): nothing was rehearsed"


HANGS = f"""{MARK}import pathlib, signal, sys
if mark.endswith(sys.argv[1]):
    pathlib.Path("here").touch()
    signal.pause()
{HEAD}{BODY}"""


@pytest.mark.parametrize(("by", "where"), [(signal.SIGINT, "/seed-1"), (signal.SIGTERM, "/reference")])
def test_an_interrupt_ends_what_was_started(tmp_path: Path, by: signal.Signals, where: str) -> None:
    write_script(tmp_path, HANGS)
    command = [sys.executable, "-m", "paceline", "rehearse", "-n", "2", "--seeds", "3", "train.py", where]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "here").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(by)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert left_processes(str(tmp_path)) == []


def rehearsal_of(folder: Path, script: str) -> Rehearsal:
    (folder / "runs").mkdir()
    return Rehearsal(folder / "runs", ["-n", "2"], [str(write_script(folder, script))])


def test_a_hang_is_ended_with_all_it_started(tmp_path: Path) -> None:
    starts = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
    rehearsal = rehearsal_of(tmp_path, f"import signal, subprocess\n{starts}\nsignal.pause()")
    rehearsal.patience_s = 6.0
    verdict = rehearsal.rehearse(1, [Fault.parse("kill standby @step 3")], Outcome(0, {"steps": 10}))
    assert re.match(r"it hung: ended after \d+ s", verdict.why)
    assert marked("runs/seed-1") == {}


LOSES_ALL = f"""{MARK}{TRAINS.replace("F.cross", "lose_all(); F.cross")}"""
LOSES_ALL = LOSES_ALL.replace(
    "run.prepare",
    """
nursery = os.getppid()   # as long as it lives: an orphan's parent is not ours to kill
def lose_all():
    if mark.endswith("/seed-1") and run.step == 100 and not run.resumed and os.getppid() == nursery:
        os.kill(nursery, 9)
run.prepare""",
)


def test_a_run_that_lost_everything_is_resumed(tmp_path: Path) -> None:
    rehearsal = rehearsal_of(tmp_path, LOSES_ALL)
    reference = rehearsal.reference()
    verdict = rehearsal.rehearse(1, [Fault.parse("kill everything @step 100")], reference)
    assert verdict.violations == (), verdict
    assert "resume" in (tmp_path / "runs" / "seed-1" / "events.jsonl").read_text()


def test_marked_processes_are_found_and_ended_whoever_started_them() -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    mark = f"a test of {os.getpid()}"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, VARIABLE: mark}, check=True)
    assert list(marked(mark).values()) == ["sleep 600"]
    end_marked(mark)
    assert marked(mark) == {}
