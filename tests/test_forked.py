"""Commands and agents that are forks of a template are those that they are on a bare machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import BODY, COMMAND, HEAD, Going, ended, environment, finish, going, paceline
from tests.forked import Popen, module_of

pytestmark = pytest.mark.usefixtures("warm")

WAITS = HEAD + BODY.replace(
    "        optimizer.step();",
    "        while not (run.dir / 'go').exists(): __import__('time').sleep(0.01)\n        optimizer.step();",
)


def world_of(pid: int, folder: Path) -> dict[str, Any]:
    """What /proc says of a process, without what no two processes have in common."""
    here = Path(f"/proc/{pid}")
    said = {name: (here / name).read_bytes().strip(b"\0").split(b"\0") for name in ("cmdline", "environ")}
    status = (here / "status").read_text().splitlines()
    return {
        "command": [word.replace(bytes(folder), b"FOLDER") for word in said["cmdline"]],
        "environment": sorted(word for word in said["environ"] if not word.startswith((b"BARE=", b"PYTEST_CURRENT"))),
        "folder": os.readlink(here / "cwd").replace(str(folder), "FOLDER"),
        "standard": [
            os.readlink(here / "fd" / str(fd)).replace(str(folder), "FOLDER").split(":")[0] for fd in range(3)
        ],
        "signals": [line for line in status if line.startswith(("SigB", "SigI", "SigC"))],
        "limits": (here / "limits").read_text(),
        "threads": len(os.listdir(here / "task")),
        "network": (here / "ns" / "net").stat().st_ino,
        "torch": "libtorch" in (here / "maps").read_text(),
    }


def made_by(pid: int) -> str:
    parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
    return Path(f"/proc/{parent}/cmdline").read_text()


def worlds(run: Going, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Of the command, the agent and its standby: their worlds, and who made them."""
    run.wait_for(run.event("worker started", worker=1), "a worker")
    pids = [run.process.pid, run.leader, run.wait_for_standby()]
    assert os.getsid(pids[1]) == pids[1] and os.getsid(pids[2]) == pids[2]
    return [world_of(pid, folder) for pid in pids], [made_by(pid) for pid in pids]


def test_forks_are_as_processes_that_were_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("forked", "bare"):
        folder = tmp_path / name
        folder.mkdir()
        with going(folder, WAITS, "-n", "2") as run:
            found[name], makers = worlds(run, folder)
            finish(run)
            result = ended(run)
        assert result.code == 0, result.err
        assert all("forked.main" in maker for maker in makers) == (name == "forked"), makers
        assert any("forked.main" in maker for maker in makers) == (name == "forked"), makers
        monkeypatch.setenv("BARE", "this test's")
    assert found["forked"] == found["bare"]


def test_mistakes_are_told_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (("--version",), ("nonsense",), ("run", "--slots"), ("show", "none"), ("--help",))
    forked = [paceline(*words, cwd=tmp_path) for words in asked]
    monkeypatch.setenv("BARE", "this test's")
    for done, words in zip(forked, asked, strict=True):
        bare = paceline(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (bare.returncode, bare.stdout, bare.stderr)


def test_the_end_of_a_fork_is_told_as_that_of_a_child(tmp_path: Path) -> None:
    with going(tmp_path, WAITS, "-n", "1") as run:
        run.wait_for(run.event("worker started"), "a worker")
        assert "forked.main" in made_by(run.process.pid)
        assert run.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(0.001)
        run.process.send_signal(signal.SIGKILL)
        assert run.process.wait(30) == -signal.SIGKILL == run.process.poll()
        finish(run)
        run.process = Popen(
            [*COMMAND, "attach", "--runs", "runs", "it"], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
        )
        run.process.wait(30)


def test_only_commands_and_agents_are_forked() -> None:
    python = COMMAND[0]
    assert module_of([python, "-m", "paceline", "runs"]) == "paceline"
    assert module_of([python, "-P", "-m", "paceline.cluster.agent", "next"]) == "paceline.cluster.agent"
    for other in (
        ["ip", "-m", "paceline"],
        [python, "-X", "dev", "-m", "paceline"],
        [python, "-m"],
        "paceline",
        [python],
    ):
        assert module_of(other) == ""
    with Popen([python, "-c", "print('plain')"], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "plain\n" and process.returncode == 0
