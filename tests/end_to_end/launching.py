"""Starting real runs from tests: real processes, the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 90

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


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env["COLUMNS"] = "250"
    env.pop("PACELINE_TICKET", None)
    return env


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def paceline(*arguments: str, cwd: Path, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def launch(folder: Path, script: str | Path, *flags: str, args: tuple[str, ...] = (), name: str = "it") -> Result:
    """`paceline run FLAGS script ARGS` in `folder`; the run is named `name`."""
    path = script if isinstance(script, Path) else write_script(folder, script)
    done = paceline("run", "--runs", "runs", "--name", name, *flags, str(path), *args, cwd=folder)
    run_folder = folder / "runs" / name
    summary_path = run_folder / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}
    return Result(done.returncode, done.stdout, done.stderr, run_folder, summary)
