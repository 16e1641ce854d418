"""The run folder: everything about one run, in files a person can read.

    config.json      the resolved settings and where each came from
    events.jsonl     what happened, each with its `why`
    metrics.jsonl    what the script logged
    logs/            one file a process: worker-0.log, …
    summary.json     how it ended
    job.json         what was started, for `paceline resume`
    agent.json       where the run's agents are found, while it runs; `secret` lets one in
    checkpoints/     the run's state, if the run writes it and its settings name no other place
    receipts/        what each step delivered, for `paceline verify`

Lines are appended in one write each, so several processes may write one file. No torch in here.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

DEFAULT_RUNS = "runs"


def new_id() -> str:
    """Sortable by time, and unique without asking anybody."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing: a reader never sees half a file, and an error leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """A value as JSON can hold it: not-a-number and infinity become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.config = path / "config.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.logs = path / "logs"
        self.job = path / "job.json"
        self.agent = path / "agent.json"
        self.secret = path / "secret"
        self.receipts = path / "receipts"

    @staticmethod
    def create(runs: Path, name: str | None) -> RunFolder:
        """A fresh folder; a name in use is refused."""
        if name is not None and not re.fullmatch(r"[\w][\w.-]{0,99}", name):
            raise UsageError(f"--name {name!r}: use letters, digits, '.', '_' and '-' (at most 100)")
        folder = RunFolder(runs / (name or new_id()))
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"a run named {folder.id!r} is in {runs} already: choose another --name, `paceline resume {folder.id}`, or remove {folder.path}"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot make the run folder {folder.path}: {error.strerror}") from None
        folder.logs.mkdir()
        return folder

    @staticmethod
    def find(runs: Path, name: str) -> RunFolder:
        """The run of this name; a unique beginning of it, 'last' or a path will do."""
        if os.sep in name and Path(name).is_dir():
            return RunFolder(Path(name))
        known = RunFolder.all(runs)
        if name == "last" and known:
            return known[-1]
        matches = [f for f in known if f.id == name] or [f for f in known if f.id.startswith(name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UsageError(f"{name!r} begins several runs: {', '.join(f.id for f in matches)}")
        raise UsageError(f"no run {name!r} in {runs}; `paceline runs` lists them, --runs names another place")

    @staticmethod
    def all(runs: Path) -> list[RunFolder]:
        if not runs.is_dir():
            return []
        found = [RunFolder(p) for p in runs.iterdir() if (p / "events.jsonl").exists() or (p / "config.json").exists()]
        return sorted(found, key=lambda folder: folder.started)

    @property
    def started(self) -> float:
        """When, as far as its files tell."""
        known = self.read_json(self.config).get("started")
        return float(known) if known else self.path.stat().st_mtime

    @property
    def checkpoints(self) -> str:
        """Where this run's checkpoints are, as far as its files tell."""
        return self.checkpoints_at(self.read_json(self.config).get("settings", {}).get("checkpoints", ""))

    def checkpoints_at(self, address: str) -> str:
        """In the run folder, or under another address, which several runs may share."""
        return f"{address.rstrip('/')}/{self.id}" if address else str(self.path / "checkpoints")

    def event(self, kind: str, why: str, **fields: Any) -> None:
        """Something happened, and why. Never raises: a full disk must not end a run."""
        record = {"time": time.time(), "event": kind, "why": why}
        self._append(self.events, {**record, **{k: plain(v) for k, v in fields.items()}})

    def metric(self, step: int, epoch: int, values: dict[str, float]) -> None:
        record = {"time": time.time(), "step": step, "epoch": epoch}
        self._append(self.metrics, {**record, **{k: plain(v) for k, v in values.items()}})

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        line = json.dumps(record, default=str) + "\n"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError:
            return

    def write_json(self, path: Path, value: Any) -> None:
        write_atomically(path, (json.dumps(plain(value), indent=2, default=str) + "\n").encode())

    def read_json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def read_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        with open(path) as file:
            yield from filter(None, map(self.parse, file))

    @staticmethod
    def parse(line: str) -> dict[str, Any]:
        """A line of events or metrics; nothing, if it is not whole."""
        try:
            value = json.loads(line)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def agent_of(self, machine: int) -> Path:
        """Where the agents of this machine are found; each machine has its own, should they share a disk."""
        return self.path / f"agent-{machine}.json" if machine else self.agent

    def machines(self) -> list[int]:
        """Whose agents can be found through this folder: of all machines, where they share it."""
        names = [path.stem for path in self.path.glob("agent*.json")]
        return sorted(int(name.removeprefix("agent").lstrip("-") or 0) for name in names)

    def secret_of(self, machine: int) -> Path:
        return self.path / f"secret-{machine}" if machine else self.secret

    def log_of(self, role: str, number: int) -> Path:
        return self.logs / f"{role}-{number}.log"
