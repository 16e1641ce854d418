"""Workers of a flat loop are killed: newcomers compute the missing shares, and the result is the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import Result, ended, going, launch
from tests.end_to_end.test_failures import left_processes

EPOCHS, STEPS, SAMPLES = 8, 32, 8 * 97
"""Batches of 32, and a last one of a single sample: two slots have none of it."""

SCRIPT = """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline

orders = sys.argv[1:]   # WORKER:STEP:MOMENT dies there
run = paceline.init(seed=3)

def at(moment):
    if f"{run._session.worker}:{run.step}:{moment}" in orders:
        os.kill(os.getpid(), 9)

g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(97, 13, generator=g), torch.randint(0, 4, (97,), generator=g))
loader = DataLoader(data, batch_size=32, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(20, 13, generator=g)), batch_size=5)
model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
at("prepare")
run.prepare(model, optimizer, scheduler, loader)

def dies_inside(name):
    peers = run._stepper._peers
    plain = getattr(peers, name)
    def called(*arguments):
        at(name)
        return plain(*arguments)
    setattr(peers, name, called)

def score(batch):
    at("evaluate")
    return {"sum": model(batch[0]).sigmoid().sum()}

for epoch in run.epochs(8):
    for x, y in loader:
        at("batch")
        for name in ("open", "exchange", "total"):
            if f"{run._session.worker}:{run.step}:{name}" in orders:
                dies_inside(name)
        if len(x) == 1:   # BatchNorm needs two
            x, y = torch.cat([x, x]), torch.cat([y, y])
        noise = 0.1 * torch.randn(len(x), 13)
        loss = F.cross_entropy(model(x + noise), y)
        at("forward")
        loss.backward()
        at("reduced")
        optimizer.step(); optimizer.zero_grad(); scheduler.step()
        run.state["steps"] = run.state.get("steps", 0) + 1
        run.log(loss=loss)
        at("end")
    run.state["score"] = run.evaluate(score, held_out)["sum"]
    at("epoch")
if run.is_main:
    (run.dir / "state").write_text(f"{run.state} {scheduler.get_last_lr()}")
"""
FLAT = ("-n", "3", "--slots", "3")


def learned(result: Result) -> dict[str, Any]:
    return {"weights": result.weights, "state": (result.folder / "state").read_text()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = launch(tmp_path_factory.mktemp("undisturbed"), SCRIPT, *FLAT)
    assert (result.summary["steps"], result.summary["samples"]) == (STEPS, SAMPLES), result.err
    return learned(result)


def check(result: Result, want: dict[str, Any], folder: Path, joins: int) -> None:
    """The same training as undisturbed, nobody counted twice, nothing left."""
    assert learned(result) == want, result.err
    assert (result.summary["steps"], result.summary["samples"]) == (STEPS, SAMPLES)
    joined = [event["worker"] for event in result.events() if event["event"] == "joined"]
    assert len(joined) >= joins, result.events()
    assert left_processes(str(folder)) == []
    stall = result.summary["longest_gap_s"] - result.summary["median_step_s"]
    print(f"stall {stall:.3f} s, {result.summary['recoveries']} deaths, joined {joined}")


MOMENTS = {
    "in the first step; before backward": ["1:0:forward", "0:9:forward"],
    "two at once, with main": ["0:6:forward", "2:6:batch"],
    "at the opening of a point; at its meeting; while adding up": ["2:5:open", "0:11:exchange", "1:17:total"],
    "between steps; in a last batch of one sample; in evaluate": ["2:7:reduced", "0:15:forward", "1:20:evaluate"],
    "the newcomer too, twice, and then a third": ["1:4:forward", "3:4:forward", "4:4:exchange", "0:4:exchange"],
    "before the first batch; between epochs; in the last step": ["2:0:prepare", "1:16:epoch", "0:31:forward"],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_at_these_moments(tmp_path: Path, moment: str, undisturbed: dict[str, Any]) -> None:
    result = launch(tmp_path, SCRIPT, *FLAT, args=tuple(MOMENTS[moment]))
    check(result, undisturbed, tmp_path, len(MOMENTS[moment]))
