"""Everything is killed at once; the run goes on from its newest good checkpoint, at another worker count."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from paceline.state.checkpoint import listed
from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import ended, going, launch, paceline, write_script

SCRIPT = """
import os, time, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init()
model = nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(272, 13, generator=g), torch.randint(0, 4, (272,), generator=g))
loader = DataLoader(data, batch_size=32, shuffle=True)
run.prepare(model, optimizer, scheduler, loader)
run.register("average", average)
run.state.setdefault("best", 0.0)
for epoch in run.epochs(12):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        average.update_parameters(model)
        run.log(lr=scheduler.get_last_lr()[0])
        while run.step >= 105 and not run.resumed and os.path.exists("doomed"):
            time.sleep(0.001)   # its killer may be late
    run.state["best"] = max(run.state["best"], float(epoch))
assert run.state["best"] == 11.0
digest = sum(p.detach().double().sum() for p in average.parameters()).item()
if run.is_main:
    print("average", digest.hex(), run.resumed)
"""
FLAGS = ("--slots", "8", "--checkpoint-every", "7")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> tuple[str, str]:
    result = alone(tmp_path_factory.mktemp("reference"), SCRIPT, slots=8)
    return result.weights, result.out.split("average ")[1].split()[0]


def killed(folder: Path, workers: int, after: int) -> Path:
    """A run whose processes were all killed once it had logged this many steps and two checkpoints were there."""
    (folder / "doomed").touch()
    doomed = Doomed(folder, write_script(folder, SCRIPT), workers, FLAGS)
    checkpoints = str(doomed.folder / "checkpoints")
    doomed.wait_for(lambda: doomed.steps() >= after and len(listed(checkpoints)) >= 2)
    doomed.kill()
    return doomed.folder


@pytest.mark.parametrize("workers", [1, 3])
def test_all_killed_then_resumed_gives_the_same_bits(
    tmp_path: Path, reference: tuple[str, str], workers: int, seed: int
) -> None:
    dice = random.Random(seed * 10 + workers)
    folder = killed(tmp_path, 2, after=dice.randrange(8, 100))
    done = paceline("resume", "--runs", "runs", "it", "-n", str(workers), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_sha256"] == reference[0]
    assert done.stdout.split("average ")[1].split() == [reference[1], "True"], "registered state comes back too"
    assert summary["samples"] == 12 * 272
    assert "going on from step" in done.stderr


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, reference: tuple[str, str]) -> None:
    folder = killed(tmp_path, 2, after=30)
    newest = listed(str(folder / "checkpoints"))[-1]
    shard = Path(newest.address) / "state-0000.bin"
    shard.write_bytes(shard.read_bytes()[:-9])
    checked = paceline("checkpoints", "--runs", "runs", "it", cwd=tmp_path)
    assert checked.returncode == 1 and "DAMAGED" in checked.stdout and "complete" in checked.stdout
    done = paceline(
        "run", "--runs", "runs", "--name", "it", "--resume", "auto", "-n", "2", *FLAGS, "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stderr and "trying the one before" in done.stderr
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == reference[0]


def test_other_slots_are_refused(tmp_path: Path) -> None:
    folder = killed(tmp_path, 1, after=10)
    job = json.loads((folder / "job.json").read_text())
    job["flags"]["slots"] = 4
    (folder / "job.json").write_text(json.dumps(job))
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 2 and "written with slots 8, this run has 4" in done.stderr


AT_ITS_END = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init(seed=1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
loader = DataLoader(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=4)
run.prepare(model, optimizer, scheduler, loader)
for epoch in run.epochs(4):
    for _ in loader:
        while run.step == 11 and not any(Path(run._session.folder.checkpoints).glob("step-*")):
            time.sleep(0.001)
        for (x,) in run.slots():
            model(x).sum().backward()
        optimizer.step(); optimizer.zero_grad()
    scheduler.step()   # once an epoch, also in one that is entered at its end
"""


def test_an_epoch_that_is_entered_at_its_end_and_a_run_that_has_finished(tmp_path: Path) -> None:
    flags = ("-n", "2", "--slots", "2", "--checkpoint-every", "10")
    want = launch(tmp_path, AT_ITS_END, *flags, name="undisturbed").weights
    script = write_script(tmp_path, AT_ITS_END)
    faults = ("--fault", "kill everything @step 12")
    paceline("run", "--runs", "runs", "--name", "it", *flags, *faults, str(script), cwd=tmp_path)
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0 and "epoch 2 is entered at its end" in done.stderr, done.stderr
    summary = tmp_path / "runs" / "it" / "summary.json"
    before = summary.read_text()
    assert json.loads(before)["weights_sha256"] == want
    again = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert again.returncode == 2 and "run 'it' has finished" in again.stderr and summary.read_text() == before


def test_without_a_checkpoint_resume_says_what_to_do(tmp_path: Path) -> None:
    launch(tmp_path, write_script(tmp_path, SCRIPT), "-n", "1", "--steps", "2")
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 2 and "--checkpoint-every" in done.stderr
    assert (tmp_path / "runs" / "it" / "summary.json").exists(), "nothing was changed"


def test_a_run_that_goes_on_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "doomed").touch()
    with going(tmp_path, SCRIPT.replace("run.step >= 105", "run.step >= 40"), "-n", "2", *FLAGS) as run:
        run.wait_for_step(30)
        for again in (["resume", "it"], ["run", "--name", "it", "--resume", "auto", "-n", "2", "train.py"]):
            done = paceline(*again, cwd=tmp_path)
            assert (
                done.returncode == 2 and "run 'it' is under way" in done.stderr and "paceline attach it" in done.stderr
            )
        (tmp_path / "doomed").unlink()
        assert ended(run).summary["exit"] == "finished"
