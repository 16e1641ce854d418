"""Whether training on a GPU ends in the same weights: in a second process, and with two workers on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.models import images, lenet
from benchmarks.turns import HERE

_CHECK_LIMIT_S = 120


def train_lenet(device: str, steps: int, batch: int, warn_only: bool) -> None:
    """Inside a process of the repeatability check: a run of one, bf16."""
    import paceline
    from paceline.state.hash import weights_sha256

    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    run = paceline.init(seed=0, precision="bf16", device=device, steps=steps)
    model = lenet().to(run.device)
    print("first", weights_sha256(model.state_dict()), flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(images(batch * 20, flat=False), batch_size=batch, shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)
    for _ in run.epochs(1 << 30):
        for _batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


SHARED = """
    import os
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    torch.use_deterministic_algorithms(True, warn_only=os.environ.get("WARN_ONLY") == "1")
    run = paceline.init(seed=0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10),
    ).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 1, 28, 28, generator=draw)
    y = torch.randint(10, (2048,), generator=draw)
    loader = DataLoader(TensorDataset(x, y), batch_size=int(sys.argv[1]), shuffle=True, drop_last=True)
    run.prepare(model, optimizer, loader)
    for epoch in run.epochs(1000):
        for batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def start(arguments: list[str], folder: Path, warn_only: bool) -> dict[str, Any]:
    """Run a Python command that trains one run into the folder; its summary, and what it printed."""
    env = {
        **os.environ,
        "PACELINE_RUNS": str(folder),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "WARN_ONLY": "1" if warn_only else "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=HERE,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done after {_CHECK_LIMIT_S} s", "printed": str(error.stderr)[-2000:]}
    printed = done.stdout + done.stderr
    summaries = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    if done.returncode or len(summaries) != 1:
        return {"error": f"exit code {done.returncode}, {len(summaries)} summaries", "printed": printed[-3000:]}
    kept = ("weights_sha256", "steps", "exit", "workers", "slots", "precision", "device", "wall_s", "time_split")
    return {**{name: summaries[0][name] for name in kept}, "printed": printed[-3000:]}


def twice(name: str, commands: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Run each command in a process of its own; whether all end in the same weights."""
    for warn_only in (False, True):
        runs = {}
        for words, arguments in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[words] = start(arguments, Path(folder), warn_only)
        if not any("error" in run and "deterministic implementation" in run["printed"] for run in runs.values()):
            break
    first = [line.split()[1] for run in runs.values() for line in run["printed"].splitlines() if line[:6] == "first "]
    hashes = [run.get("weights_sha256") for run in runs.values()]
    same = None not in hashes and len(set(hashes)) == 1 and hashes[0] not in first
    same = same and all(run["steps"] == steps for run in runs.values())
    print(f"\n{name}: {'the same weights' if same else 'NOT THE SAME'}" + (" (warn_only)" if warn_only else ""))
    for words, run in runs.items():
        print(f"  {words:28} {run.get('weights_sha256', run.get('error'))}  {run.get('device', '')}", flush=True)
        if "error" in run:
            print(textwrap.indent(run["printed"], "    | "))
    return {"same": same, "warn_only": warn_only, "weights_before": first, "runs": runs}


def check_repeats(device: str, small: bool) -> dict[str, Any]:
    steps = 10 if small else 100
    command = ["-m", "benchmarks.gpu", "--train", str(steps), "--device", device, *(["--small"] if small else [])]
    name = f"LeNet, {steps} steps in bf16, a run of one, two processes"
    return twice(name, {"first process": command, "second process": command}, steps)


def check_shares(device: str, slots: int, batch: int) -> dict[str, Any]:
    """Two workers on one GPU against one. The mean divides by the slots: exact when they are a power of
    two; when not, host and GPU must round alike."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(SHARED))
        flags = ["--device", device, "--slots", str(slots), "--steps", "30", "--show", "all", str(script), str(batch)]
        commands = {
            f"-n 2 --share-gpus --slots {slots}": ["-m", "paceline", "run", "-n", "2", "--share-gpus", *flags],
            f"-n 1 --slots {slots}": ["-m", "paceline", "run", "-n", "1", *flags],
        }
        name = f"LeNet with dropout, 30 steps in fp32, {slots} slots, two workers on one GPU"
        return twice(name, commands, 30)
