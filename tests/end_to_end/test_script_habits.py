"""What scripts do around their loops, and in them, with a worker killed or all of them: the weights of one that nothing happened to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import Result, launch, paceline

HEAD = """
import os, sys, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init(seed=1)
orders = sys.argv[1:]
def at(step):
    if run.step == step and run._session.worker == 1 and "die" in orders:
        os.kill(os.getpid(), 9)
    while run.step == step + 1 and "die" in orders and run._session.worker < 3 and run._session.next_term <= run._session.view.term:
        time.sleep(0.001)  # its successor comes in at this step's end
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(96, 13, generator=g), torch.randint(0, 4, (96,), generator=g))
loader, other = DataLoader(data, batch_size=12, shuffle=True), DataLoader(data, batch_size=24)
model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
def score(b):
    return {"n": len(b[0]), "s": model(b[0]).sum()}
def train(x, y, scale=1.0):
    (scale * F.cross_entropy(model(x), y)).backward()
def step():
    optimizer.step(); optimizer.zero_grad()
"""

SCRIPTS = {
    "evaluates between two loops": """
run.prepare(model, optimizer, loader, other)
for epoch in run.epochs(3):
    for batch in loader:
        for x, y in run.slots(): train(x, y)
        step()
    run.evaluate(score, other)
    for batch in other:
        at(9)
        for x, y in run.slots(): train(x, y, 0.5)
        step()
    run.log(m=run.evaluate(score, other)["s"])
""",
    "leaves a phase of steps": """
run.prepare(model, optimizer)
def phase(n, scale, until=None):
    for _ in run.steps(n):
        at(8)
        for _ in run.slots(): train(torch.randn(4, 13), torch.randint(0, 4, (4,)), scale)
        step()
        if run.step == until: break
phase(20, 1.0, until=5)
run.evaluate(score, other)
phase(34, 0.01)
""",
    "leaves the first of two loaders": """
run.prepare(model, optimizer, loader, other)
for epoch in run.epochs(4):
    for batch in loader:
        for x, y in run.slots(): train(x, y)
        step()
        if run.step == 9 * epoch + 4: break
    for batch in other:
        at(9 + 7)
        for x, y in run.slots(): train(x, y, 0.5)
        step()
    run.log(m=run.evaluate(score, other)["s"])
""",
    "freezes a part for good": """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(4):
    if epoch == 1:
        model[:2].requires_grad_(False).eval()
    for batch in loader:
        at(18)
        for x, y in run.slots(): train(x, y)
        step()
""",
    "clears gradients to zeros": """
class Two(nn.Module):
    def __init__(self):
        super().__init__(); self.body, self.a, self.b = nn.Linear(13, 8), nn.Linear(8, 4), nn.Linear(8, 4)
    def forward(self, x): return (self.a if run.step % 2 else self.b)(self.body(x).relu())
model = Two(); optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(4):
    for batch in loader:
        at(10)
        for x, y in run.slots(): train(x, y)
        optimizer.step(); optimizer.zero_grad(set_to_none=False)
""",
}


SCRIPTS |= {
    "takes steps behind its epochs": """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.slots(): train(x, y)
        step()
    if epoch == 1 and "stop" in orders and not run.resumed: run.stop("enough")
for _ in run.steps(30):
    at(20)
    for _ in run.slots(): train(torch.randn(4, 13), torch.randint(0, 4, (4,)), 0.5)
    step()
""",
    "comes to phases by where it is": """
run.prepare(model, optimizer)
def phase(n, scale):
    for _ in run.steps(n):
        at(26)
        for _ in run.slots(): train(torch.randn(4, 13), torch.randint(0, 4, (4,)), scale)
        step()
        if run.step == 25 and "stop" in orders and not run.resumed: run.stop("enough")
if run.step < 10: phase(10, 1.0)
if run.step < 20: phase(20, 0.5)
phase(40, 0.1)
""",
}


def done(folder: Path, script: str, *flags: str, args: tuple[str, ...] = ()) -> Result:
    folder.mkdir()
    result = launch(folder, HEAD + script, "-n", "3", "--slots", "3", *flags, args=args)
    assert result.code == 0, f"{result.out}\n{result.err}"
    return result


@pytest.mark.parametrize("habit", SCRIPTS)
def test_a_worker_is_killed_and_the_run_goes_on_as_if_not(tmp_path: Path, alone: Alone, habit: str) -> None:
    clean = alone(tmp_path, HEAD + SCRIPTS[habit], slots=3)
    killed = done(tmp_path / "killed", SCRIPTS[habit], args=("die",))
    assert killed.summary["recoveries"] == 1
    assert (killed.weights, killed.summary["steps"]) == (clean.weights, clean.summary["steps"])


@pytest.mark.parametrize(
    "habit", ["leaves a phase of steps", "leaves the first of two loaders", "freezes a part for good"]
)
def test_a_run_is_stopped_behind_that_and_resumed(tmp_path: Path, alone: Alone, habit: str) -> None:
    clean = alone(tmp_path, HEAD + SCRIPTS[habit], slots=3)
    stopped = done(tmp_path / "it", SCRIPTS[habit], "--checkpoint-every", "100", "--steps", "17")
    assert stopped.summary["steps"] == 17
    again = paceline("resume", "it", "-n", "2", "--steps", "0", cwd=tmp_path / "it")
    assert again.returncode == 0, again.stderr
    summary = json.loads((stopped.folder / "summary.json").read_text())
    assert (summary["weights_sha256"], summary["steps"]) == (clean.weights, clean.summary["steps"])


@pytest.mark.parametrize("habit", ["takes steps behind its epochs", "comes to phases by where it is"])
def test_a_run_that_stops_itself_goes_on_in_the_loop_it_was_in(tmp_path: Path, alone: Alone, habit: str) -> None:
    clean = alone(tmp_path, HEAD + SCRIPTS[habit], slots=3)
    stopped = done(tmp_path / "it", SCRIPTS[habit], "--checkpoint-every", "100", args=("stop",))
    assert stopped.summary["exit"] == "enough" and stopped.summary["steps"] < clean.summary["steps"]
    again = paceline("resume", "it", cwd=tmp_path / "it")
    assert again.returncode == 0, again.stderr
    summary = json.loads((stopped.folder / "summary.json").read_text())
    assert (summary["weights_sha256"], summary["steps"]) == (clean.weights, clean.summary["steps"])


FLAT = """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        train(x, y); step()
        if run.step + 1 == 6 * (epoch + 1): break
for _ in run.steps(30):
    if run.step == 13 and run._session.worker == 1 and "die" in orders:
        os.kill(os.getpid(), 9)
    train(torch.randn(4, 13), torch.randint(0, 4, (4,)), 0.5); step()
"""


@pytest.mark.parametrize("strategy", ["local:20", "diloco:4"])
def test_replicas_that_take_steps_behind_epochs_they_have_left(tmp_path: Path, strategy: str) -> None:
    clean = done(tmp_path / "clean", FLAT, "--strategy", strategy)
    killed = done(tmp_path / "killed", FLAT, "--strategy", strategy, args=("die",))
    assert killed.summary["recoveries"] == 1 and killed.summary["steps"] == clean.summary["steps"] == 30
    assert killed.weights == clean.weights


def test_a_stop_in_the_step_in_which_a_loop_is_left_keeps_a_checkpoint(tmp_path: Path, alone: Alone) -> None:
    habit = "leaves the first of two loaders"
    clean = alone(tmp_path, HEAD + SCRIPTS[habit], slots=3)
    stopped = done(tmp_path / "it", SCRIPTS[habit], "--checkpoint-every", "100", "--steps", "14")
    assert [path.name for path in (stopped.folder / "checkpoints").iterdir()] == ["step-00000014"]
    again = paceline("resume", "it", "--steps", "0", cwd=tmp_path / "it")
    assert again.returncode == 0, again.stderr
    assert json.loads((stopped.folder / "summary.json").read_text())["weights_sha256"] == clean.weights


def test_an_iterator_with_a_name_is_left_at_its_epoch_s_end(tmp_path: Path) -> None:
    """Though it lives on, its last step is that epoch's."""
    named = """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(3):
    batches = iter(loader)
    for _ in range(len(loader)):
        batch = next(batches)
        for x, y in run.slots(): train(x, y)
        step()
"""
    plain = """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(3):
    for batch in loader:
        for x, y in run.slots(): train(x, y)
        step()
"""
    found = [done(tmp_path / name, script) for name, script in (("named", named), ("plain", plain))]
    assert [each.summary["samples"] for each in found] == [288, 288] and found[0].weights == found[1].weights
    proven = paceline("verify", "it", cwd=tmp_path / "named")
    assert proven.returncode == 0, proven.stdout
