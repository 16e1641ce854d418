"""Starting real runs from tests: real processes, the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.cluster.store import LocalStore
from tests.forked import Popen
from tests.leaks import end_processes_of

if TYPE_CHECKING:
    from tests.alone import Alone

TIMEOUT_S = 90
COMMAND = [sys.executable, "-m", "paceline"]
WAITS = "run.step >= 100"
"""In scripts that wait at this step until they are let go."""

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
model = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(96, 13, generator=g), torch.randint(0, 4, (96,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
"""

BODY = """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""


@dataclass
class Result:
    code: int
    out: str
    err: str
    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""

    @property
    def weights(self) -> str:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return str(self.summary["weights_sha256"])

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


PATIENCE_S = 80
warm_variables: dict[str, str] = {}
"""With these, a run's nursery need not import torch; the fixture `warm` puts them here."""


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env["COLUMNS"] = "250"
    env.pop("PACELINE_TICKET", None)
    return env | warm_variables


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def paceline(*arguments: str, cwd: Path, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """The command to its end. A run outlives its terminal: one that takes too long is ended as a whole."""
    command = [*COMMAND, *arguments]
    with Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            _print_what_happened(cwd)
            end_processes_of(cwd)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _print_what_happened(folder: Path) -> None:
    """Of runs that do not end: their folders are soon gone, and what hung once may not hang again for long."""
    for path in [*folder.rglob("events.jsonl"), *folder.rglob("logs/*.log")]:
        print(f"--- {path}\n{path.read_text(errors='replace')[-6000:]}")


def launch(folder: Path, script: str | Path, *flags: str, args: tuple[str, ...] = (), name: str = "it") -> Result:
    """`paceline run FLAGS script ARGS` in `folder`; the run is named `name`."""
    path = script if isinstance(script, Path) else write_script(folder, script)
    done = paceline("run", "--runs", "runs", "--name", name, *flags, str(path), *args, cwd=folder)
    run_folder = folder / "runs" / name
    summary_path = run_folder / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    return Result(done.returncode, done.stdout, done.stderr, run_folder, summary)


def undisturbed(script: str, slots: int) -> Any:
    """A fixture: what a run of one worker learns that waits for nothing."""

    @pytest.fixture(scope="module")
    def weights(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
        return alone(tmp_path_factory.mktemp("undisturbed"), script.replace(WAITS, "False"), slots=slots).weights

    return weights


class Going:
    """A run that is under way."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self._read: dict[str, tuple[tuple[int, int, int], list[dict[str, Any]]]] = {}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of a file that is written to its end only. It is asked for every few milliseconds: read when it has changed."""
        path = self.folder / name
        try:
            now = path.stat()
            stamp = (now.st_ino, now.st_size, now.st_mtime_ns)
            if name not in self._read or self._read[name][0] != stamp:
                text = path.read_text()
                self._read[name] = stamp, [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        except OSError:
            return []
        return self._read[name][1]

    def wait_for(self, what: Callable[[], Any], words: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            assert self.process.poll() is None, f"{words} never came: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"{words} has not come: {self.lines('events.jsonl')}"
            time.sleep(0.002)
        return found

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(line["step"] >= step for line in self.lines("metrics.jsonl")), f"step {step}")

    def event(self, name: str, **fields: Any) -> Callable[[], dict[str, Any] | None]:
        def found() -> dict[str, Any] | None:
            for event in self.lines("events.jsonl"):
                if event["event"] == name and all(event.get(key) == value for key, value in fields.items()):
                    return event
            return None

        return found

    @property
    def leader(self) -> int:
        """The process that leads the run now."""
        known = json.loads((self.folder / "agent.json").read_text())
        store = LocalStore(Path(known["store"]))
        try:
            return store.read().pid
        finally:
            store.close()

    def wait_for_standby(self) -> int:
        """Until the leader has a standby that can take over; its process."""
        return int(self.wait_for(self.event("standby", leader=self.leader), "a standby")["pid"])

    def kill(self, *workers: int, by: signal.Signals = signal.SIGKILL) -> None:
        pids = [
            self.wait_for(self.event("worker started", worker=worker), f"worker {worker}")["pid"] for worker in workers
        ]
        for pid in pids:
            os.kill(pid, by)


def finish(run: Going) -> None:
    """Let a script go that waits."""
    (run.folder / "go").touch()


@contextmanager
def going(folder: Path, script: str, *flags: str, args: tuple[str, ...] = ()) -> Iterator[Going]:
    path = write_script(folder, script)
    process = Popen(
        [*COMMAND, "run", "--runs", "runs", "--name", "it", *flags, str(path), *args],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Going(folder / "runs" / "it", process)
    finally:
        if process.poll() is None:
            end_processes_of(folder)
        process.communicate()


def ended(run: Going) -> Result:
    out, err = run.process.communicate(timeout=PATIENCE_S)
    summary = json.loads((run.folder / "summary.json").read_text())
    return Result(run.process.returncode, out, err, run.folder, summary)
