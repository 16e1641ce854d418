"""What the verbs print: whole ids, a time line, the way out of a mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from paceline.cli import cli
from paceline.cli.runs import listing
from paceline.cli.show import timeline
from paceline.errors import UsageError
from paceline.folder import RunFolder
from tests.end_to_end.launching import environment


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


# runs

ROW = {
    "run": "20261116-043552-c4c1",
    "started": "2026-11-16 04:35",
    "exit": "failed: worker 1: RuntimeError: the size of tensor a must match the size of tensor b",
    "steps": "800",
    "workers": "3",
    "slots": "4",
    "samples/s": "2,277",
    "weights": "33f97349fca9",
}
FINE = {**ROW, "run": "mine", "exit": "finished"}


def test_without_a_width_only_a_long_exit_is_cut() -> None:
    head, first, second = listing([ROW, FINE], None)
    assert head.split() == list(ROW)
    assert all(value in first for name, value in ROW.items() if name != "exit")
    assert f"  {ROW['exit'][:59]}…  800 " in first
    assert first.index("800") == second.index("800") == head.index("steps")


@pytest.mark.parametrize("width", range(10, 200, 7))
def test_an_id_is_never_cut_and_lines_fit_where_they_can(width: int) -> None:
    lines = listing([ROW, FINE], width)
    assert lines[1].startswith(ROW["run"] + " ") and lines[2].startswith("mine ")
    assert max(map(len, lines)) <= max(width, len(ROW["run"]) + 2 + len("exit"))


def test_the_time_goes_first_and_the_exit_is_cut_with_an_ellipsis() -> None:
    head, first, _ = listing([ROW, FINE], 100)
    assert "started" not in head and "slots" in head and "weights" in head
    assert "failed: worker 1: " in first and "…" in first
    assert "started" not in listing([FINE], 70)[0] and "started" in listing([FINE], 90)[0]


def test_runs_are_listed_on_one_line_each(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a-run-with-a-very-long-name-of-its-own-that-is-longer-than-most")
    run.write_json(run.config, {"settings": {"workers": 2, "slots": 4}, "started": time.time()})
    run.write_json(run.summary, {"exit": "failed: two things:\n" + "because " * 20})
    lines = call("runs", "--runs", str(tmp_path)).output.splitlines()
    assert len(lines) == 2 and run.id in lines[1] and "failed: two things: …  " in lines[1]
    assert lines[1].split()[-2:] == ["2", "4"]
    assert call("show", "--runs", str(tmp_path), run.id).output.count("because") == 20


# show


def event(at: float, name: str, why: str, **fields: Any) -> dict[str, Any]:
    return {"time": 100.0 + at, "event": name, "why": why, **fields}


def test_a_death_reads_as_a_time_line() -> None:
    told = timeline(
        [
            event(0.0, "launched", "paceline run train.py", workers=3),
            event(0.01, "worker started", "the run begins", worker=0, pid=11),
            event(0.01, "worker started", "the run begins", worker=1, pid=12),
            event(0.02, "worker started", "the run begins", worker=2, pid=13),
            event(6.2, "worker ended", "was killed by SIGKILL", worker=1, exit_code=-9),
            event(6.2, "view", "worker 1 was killed by SIGKILL", term=2, workers=[0, 2]),
            event(6.2, "starting a worker", "worker 1 was killed by SIGKILL", worker=3),
            event(6.2, "worker started", "it stands for worker 1", worker=3, pid=14),
            event(8.7, "view", "worker 3 is ready to join", term=3, workers=[0, 2, 3]),
            event(8.7, "joined", "it has the run's state", worker=3),
            event(9.0, "ending a worker", "its join was overtaken by the death of worker 1", worker=10),
            event(14.6, "finished", "finished", steps=1, weights_sha256="33f97349fca9a3f8"),
        ]
    )
    assert [(row[0].strip(), *row[1:]) for row in told] == [
        ("0.0 s", "launched", "3 workers", "paceline run train.py"),
        ("0.0 s", "worker started", "workers 0-2", "the run begins"),
        ("6.2 s", "worker ended", "worker 1", "was killed by SIGKILL"),
        ("6.2 s", "view", "workers 0,2", "term 2: worker 1 was killed by SIGKILL"),
        ("6.2 s", "starting a worker", "worker 3", "worker 1 was killed by SIGKILL"),
        ("6.2 s", "worker started", "worker 3", "it stands for worker 1"),
        ("8.7 s", "view", "workers 0,2-3", "term 3: worker 3 is ready to join"),
        ("8.7 s", "joined", "worker 3", "it has the run's state"),
        ("9.0 s", "ending a worker", "worker 10", "its join was overtaken by the death of worker 1"),
        ("14.6 s", "finished", "", "1 step, weights 33f97349fca9"),
    ]


def test_the_death_of_a_server_reads_as_a_time_line() -> None:
    told = timeline(
        [
            event(0.0, "worker started", "the run begins", worker=0, pid=10),
            event(0.0, "server started", "it holds parameters", server=0, pid=11),
            event(0.0, "server started", "it holds parameters", server=1, pid=12),
            event(6.2, "server ended", "was killed by SIGKILL", server=1, exit_code=-9, lost=True),
            event(6.2, "layout", "server 1 was killed by SIGKILL", layout=2, bytes={"0": 5}, leads={"0": 5}, copies=1),
            event(6.2, "starting a server", "server 1 was killed by SIGKILL", server=2),
            event(9.0, "failed", "server 0 was killed by SIGKILL", server=0),
        ]
    )
    assert [row[1:] for row in told[1:]] == [
        ("server started", "servers 0-1", "it holds parameters"),
        ("server ended", "server 1", "was killed by SIGKILL"),
        ("layout", "server 0", "layout 2: server 1 was killed by SIGKILL"),
        ("starting a server", "server 2", "server 1 was killed by SIGKILL"),
        ("failed", "server 0", "was killed by SIGKILL"),
    ]


def test_a_failure_names_its_worker_once_and_stays_on_one_line() -> None:
    rows = timeline([event(0, "failed", "worker 1: RuntimeError: a\nb", worker=1), event(1, "failed", "", worker=2)])
    assert [row[2:] for row in rows] == [("worker 1", "RuntimeError: a"), ("worker 2", "")]
    (row,) = timeline([event(0, "failed", "worker 12 was lost", worker=1)])
    assert row[2:] == ("worker 1", "worker 12 was lost")


def test_an_agreed_stop_says_why_it_finished() -> None:
    (row,) = timeline([event(0, "finished", "step limit 5 reached", steps=5, weights_sha256="ab" * 32)])
    assert row[3] == "step limit 5 reached; 5 steps, weights abababababab"


def test_a_run_that_failed_early_shows_what_is_known(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.event("launched", "paceline run train.py", workers=2)
    run.write_json(run.summary, {"exit": "failed: [boom]", "steps": 0, "samples": 0, "workers": 2, "wall_s": 1.0})
    shown = call("show", "--runs", str(tmp_path), "last").output
    assert "None" not in shown and "failed: [boom]" in shown and "2 workers\n" in shown
    assert "setting" not in shown
    run.write_json(run.config, {"settings": {"workers": 2, "slots": 4, "threads": 1}, "origins": {"slots": "flag"}})
    shown = call("show", "--runs", str(tmp_path), "last").output
    assert "2 workers, 4 slots, 1 thread each" in shown and "slots    4      flag" in shown


def test_a_run_that_is_not_over_can_be_shown(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.event("launched", "paceline run train.py", workers=1)
    shown = call("show", "--runs", str(tmp_path), "last").output
    assert "running, or lost" in shown and "0.0 s  launched  1 worker  paceline run train.py" in shown
    run.event("worker started", "the run begins", worker=0, pid=os.getpid())
    assert str(os.getpid()) not in call("show", "--runs", str(tmp_path), "last").output, "it is lost: nobody leads it"


def test_the_servers_of_a_run_are_shown(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.event("launched", "paceline run train.py", workers=1)
    run.event("server started", "it holds parameters", server=0, pid=11)
    run.event("layout", "main has said it", layout=1, bytes={0: 2048}, leads={0: 1024}, copies=1)
    shown = call("show", "--runs", str(tmp_path), "last").output
    assert "\n\n1 server\n\n" in shown and "server  from   to  holds  answers for  end\n" in shown
    assert "0       0.0 s      2 KiB  1 KiB\n" in shown and "failover" not in shown


# logs


def test_logs_of_one_worker_or_one_server(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.event("launched", "paceline run train.py", workers=1)
    for role, number in (("worker", 0), ("worker", 1), ("server", 1)):
        run.log_of(role, number).write_text(f"I am {role} {number}\n")

    def logs(*flags: str) -> Result:
        return call("logs", "--runs", str(tmp_path), *flags, "last")

    assert logs().output.splitlines() == [
        "server-1 │ I am server 1",
        "worker-0 │ I am worker 0",
        "worker-1 │ I am worker 1",
    ]
    assert logs("--server", "1").output == "I am server 1\n"
    assert logs("--worker", "1").output == "I am worker 1\n"
    assert "worker-0 │ " in logs("--worker", "0", "--server", "1").output
    assert str(logs("--server", "0").exception) == "run mine has no server 0"
    assert str(logs("--worker", "7").exception) == "run mine has no worker 7"


# mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "4", "x.py"], "-n is a flag of 'paceline run'; use: paceline run -n 4 x.py"),
        (["--slots=4", "x.py", "a b"], "--slots is a flag of 'paceline run'; use: paceline run --slots=4 x.py 'a b'"),
        (["x.py", "--lr", "1"], "x.py is no verb; use: paceline run x.py --lr 1"),
        (["--bogus"], "No such option '--bogus'"),
        (["walk"], "No such command 'walk'"),
    ],
)
def test_a_forgotten_verb_is_named(arguments: list[str], says: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and says in result.output


def test_a_file_that_is_no_file_of_weights(tmp_path: Path) -> None:
    for name, content in (("notweights.py", b"import torch\n"), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(content)
        result = call("hash", str(tmp_path / name))
        assert isinstance(result.exception, UsageError)
        assert str(result.exception) == f"{tmp_path / name} is not a torch or safetensors file"


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_weights_are_hashed(tmp_path: Path, zipped: bool) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    assert call("hash", str(tmp_path / "w.pt")).output.startswith("8aefad56d866")


def test_what_a_hash_leaves_out_is_said_beside_it(tmp_path: Path) -> None:
    zeros = {"w": torch.zeros(2)}
    path = str(tmp_path / "w.pt")
    torch.save({"model": zeros, "ema": {"w": torch.ones(2)}, "best": torch.tensor(0.9), "epoch": 3}, path)
    result = call("hash", path)
    assert result.stdout.startswith("8aefad56d866") and len(result.stdout.split()) == 1, (
        "the number alone can be piped on"
    )
    assert result.stderr == f"paceline: this is the hash of 'model' in {path}; left out: 'ema', 'best'\n"
    torch.save({"state_dict": {"model": zeros, "head": zeros}, "opt": {"state": {0: {"m": torch.zeros(2)}}}}, path)
    assert "the hash of 'state_dict.model' in" in call("hash", path).stderr
    assert call("hash", path).stderr.endswith("left out: 'opt', 'state_dict.head'\n")
    torch.save({**zeros, "buffers": zeros}, path)
    assert "the hash of the tensors at the top in" in call("hash", path).stderr
    for alone in (zeros, {"model": zeros}, {"model": zeros, "epoch": 3, "optimizer": {"lr": 0.1}}):
        torch.save(alone, path)
        assert call("hash", path).output.split() == [call("hash", path).stdout.strip()], "nothing is left out"


# doctor


def test_the_doctor_finds_a_sound_machine_sound(tmp_path: Path) -> None:
    """Wherever it is asked: also beside a folder that is called like the package, as a clone is."""
    (tmp_path / "paceline").mkdir()
    command = [sys.executable, "-P", "-m", "paceline", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for transport in ("shm", "gloo"):
        assert re.search(rf"^{transport} +true \(2 MB between 2 workers in [\d.]+ ms\)$", done.stdout, re.MULTILINE)
