"""How a run ends when something goes wrong: soon, with the cause last, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.launching import BODY, HEAD, environment, launch, paceline, write_script
from tests.leaks import shared_files

FAILING = (
    HEAD
    + """
import ctypes, os, sys, time
run.prepare(model, optimizer, loader)
for epoch in run.epochs(1000):
    for batch in loader:
        if run.step == 3 and run._session.worker in {who}:
            open("failed-at", "w").write(repr(time.time()))
            {how}
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
)

HOWS = {
    "raises": ("raise RuntimeError('boom')", 1, ": RuntimeError: boom (worker "),
    "exits": ("sys.exit(3)", 3, "worker 1: the script called sys.exit(3)"),
    "segfaults": ("ctypes.string_at(0)", 1, "worker 1 was killed by SIGSEGV"),
    "aborts": ("os.abort()", 1, "worker 1 was killed by SIGABRT"),
    "leaves": ("os._exit(0)", 1, "worker 1 left the script early, with exit code 0"),
}


def left_processes(mark: str) -> list[str]:
    """Command lines of living processes that have `mark` in their environment or arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                if mark.encode() in command:
                    found.append(command.decode(errors="replace"))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("how", HOWS)
def test_a_failing_worker_ends_the_run(tmp_path: Path, how: str) -> None:
    code, exit_code, cause = HOWS[how]
    before = shared_files()
    # One exception alone may be its worker's own fault: see test_exceptions.
    result = launch(tmp_path, FAILING.format(how=code, who=(0, 1, 2) if how == "raises" else (1,)), "-n", "3")
    took = time.time() - float((tmp_path / "failed-at").read_text())
    assert result.code == exit_code
    assert cause in result.last_line
    assert took < 5.0
    assert left_processes(str(tmp_path)) == []
    assert shared_files() <= before
    assert str(result.summary["exit"]).startswith("failed")
    if how == "raises":
        assert "Traceback" in result.err and "train.py" in result.err
        assert "boot.py" not in result.err and "paceline/run.py" not in result.err
    if how == "segfaults":
        assert "Fatal Python error: Segmentation fault" in result.err


@pytest.mark.parametrize("how", ["raise ValueError('boom')", "sys.exit('boom')"])
def test_last_words_behind_an_unfinished_line_are_told_once(tmp_path: Path, how: str) -> None:
    """A progress bar ends its line with the next one's beginning."""
    result = launch(tmp_path, f"import sys\nsys.stderr.write('begun\\n\\r 50%|###')\n{how}\n", "-n", "1")
    assert result.code == 1 and "boom" in result.last_line and "boom" not in result.out
    assert result.out.splitlines() == ["begun", " 50%|###"] and "---" not in result.err


LATE = """
import os, sys
from paceline.wires.link import LeaderLink

class Late:
    flush = sys.stderr.flush
    def write(self, text):   # as another thread might, or faulthandler
        sys.__stderr__.write(text); sys.__stderr__.flush(); os.write(2, b"behind it\\n")

sys.stderr = Late()
"""


def test_what_is_said_behind_the_last_words_is_shown(tmp_path: Path) -> None:
    result = launch(tmp_path, LATE + "raise ValueError('boom')", "-n", "1")
    assert result.code == 1 and "ValueError: boom" in result.last_line
    assert result.out.splitlines() == ["behind it"] and "---" not in result.err


def test_what_no_leader_could_be_told_is_shown_from_the_log(tmp_path: Path) -> None:
    unheard = "LeaderLink._once = lambda *_: (_ for _ in ()).throw(OSError())\n"
    result = launch(tmp_path, LATE + unheard + "sys.exit('boom')", "-n", "1")
    assert result.code == 1 and result.out.splitlines() == ["boom", "behind it"] and "---" not in result.err


def test_a_syntax_error_starts_nothing(tmp_path: Path) -> None:
    result = launch(tmp_path, "def broken(:\n", "-n", "3")
    assert result.code == 2 and "SyntaxError" in result.err and "does not compile" in result.last_line
    assert not result.folder.exists()


def test_an_error_in_a_module_target(tmp_path: Path) -> None:
    write_script(tmp_path, "import nowhere_at_all", "broken.py")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "-n", "2", "-m", "broken"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No module named 'nowhere_at_all'" in done.stderr.strip().splitlines()[-1]


ENDLESS = (
    HEAD
    + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(10**6):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        if run.step == 5 and run.is_main:
            open("training", "w").close()
{more}
"""
)


def start_endless(tmp_path: Path, more: str = "", mark: str = "training") -> subprocess.Popen[str]:
    path = write_script(tmp_path, ENDLESS.format(more=more))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "-n", "2", "--name", "it", str(path)],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / mark).exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


def test_ctrl_c_once_stops_cleanly(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopping after this step" in err and "interrupted (Ctrl-C)" in err and "weights" in err
    assert "paceline resume" not in err, "it has no checkpoint"
    assert left_processes(str(tmp_path)) == []


def test_sigterm_to_the_command_is_told_as_what_it_was(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "told to end (SIGTERM): stopping after this step" in err and "Ctrl-C" not in err and "weights" in err
    shown = paceline("show", "last", cwd=tmp_path).stdout
    assert re.search(r"exit +told to end \(SIGTERM\)", shown)
    launched = re.search(r"launched .* (paceline run .*)", shown)
    assert launched and launched[1] == f"paceline run -n 2 --name it {tmp_path}/train.py"


def test_ctrl_c_twice_kills(tmp_path: Path) -> None:
    hang = "        if run.step >= 5 and not run.is_main:\n            open('hung', 'w').close(); import signal; signal.pause()"
    process = start_endless(tmp_path, hang, mark="hung")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping after this step" not in process.stderr.readline():
        continue
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "killed by a second Ctrl-C" in err
    assert left_processes(str(tmp_path)) == []


def test_a_wait_says_on_whom(tmp_path: Path) -> None:
    slow = """
        while run.step == 6 and not run.is_main and '"waiting"' not in (run.dir / "events.jsonl").read_text():
            continue
        if run.step == 8: run.stop('seen')"""
    result = launch(tmp_path, ENDLESS.format(more=slow), "-n", "2")
    assert result.code == 0, result.err
    assert "worker 0 waited" in result.err and "for worker 1" in result.err
    assert any(event["event"] == "waiting" and event["worker"] == 1 for event in result.events())
    assert (
        "time.sleep" in (result.folder / "logs" / "worker-1.log").read_text()
        or "train.py" in (result.folder / "logs" / "worker-1.log").read_text()
    )


def test_two_runs_at_once_do_not_collide(tmp_path: Path) -> None:
    path = write_script(tmp_path, HEAD + BODY)
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--transport", "gloo", str(path)]
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(list((tmp_path / "runs").iterdir())) == 2
