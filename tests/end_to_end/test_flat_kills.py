"""Workers of a flat loop are killed: newcomers compute the missing shares, and the result is the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import machines
from tests.end_to_end.killing import DYING
from tests.end_to_end.launching import Result, ended, finish, going, launch, paceline
from tests.end_to_end.test_failures import left_processes

EPOCHS, STEPS, SAMPLES = 8, 32, 8 * 97
"""Batches of 32, and a last one of a single sample: two slots have none of it."""

SCRIPT = (
    """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline

width, loaders, *orders = sys.argv[1:]   # orders: WORKER:STEP:MOMENT dies there
run, width = paceline.init(seed=3), int(width)
"""
    + DYING
    + """
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(97, 13, generator=g), torch.randint(0, 4, (97,), generator=g))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=int(loaders))
held_out = DataLoader(TensorDataset(torch.randn(20, 13, generator=g)), batch_size=5)
model = nn.Sequential(nn.Linear(13, width), nn.BatchNorm1d(width, momentum=0.3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
at("prepare")
run.prepare(model, optimizer, scheduler, loader)

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
)
FLAT = ("-n", "3", "--slots", "3")
SMALL = ("16", "0")
LARGE = ("6000", "2")
"""Over 256 KiB of gradients: workers add up chunks for each other, and meet once more."""


def learned(result: Result) -> dict[str, Any]:
    return {"weights": result.weights, "state": (result.folder / "state").read_text()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = launch(tmp_path_factory.mktemp("undisturbed"), SCRIPT, *FLAT, args=SMALL)
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
    "while adding up; at a meeting; at the opening of a point": ["2:5:total", "0:11:exchange", "1:17:open"],
    "between steps; in a last batch of one sample; in evaluate": ["2:7:reduced", "0:15:forward", "1:20:evaluate"],
    "the newcomer too, twice, and then a third": ["1:4:forward", "3:4:forward", "4:4:exchange", "0:4:exchange"],
    "before the first batch; between epochs; in the last step": ["2:0:prepare", "1:16:epoch", "0:31:forward"],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_at_these_moments(tmp_path: Path, moment: str, undisturbed: dict[str, Any]) -> None:
    result = launch(tmp_path, SCRIPT, *FLAT, args=(*SMALL, *MOMENTS[moment]))
    check(result, undisturbed, tmp_path, len(MOMENTS[moment]))


@pytest.mark.parametrize("spares", [0, 1])
def test_random_kills_from_outside(tmp_path: Path, spares: int, undisturbed: dict[str, Any]) -> None:
    """A worker, and two at once with main among them; each time the run is whole again before the next."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    one, other = draw.choice([1, 2]), draw.randint(10, 20)
    faults = [f"kill worker:{one} @step {draw.randint(1, 8)}", f"kill main @step {other}"]
    faults += [f"kill worker:{3 - one} @step {other}"]
    flags = [flag for fault in faults for flag in ("--fault", fault)]
    result = launch(tmp_path, SCRIPT, *FLAT, "--spares", str(spares), *flags, args=SMALL)
    check(result, undisturbed, tmp_path, 3)
    assert result.summary["longest_gap_s"] < 1.0


WAITS = """at("batch")
        if run.step == 4:   # until the spare stands at the loop
            from paceline.wires.board import Phase
            while run._session.board.see(3).phase != Phase.JOINING:
                time.sleep(0.001)
"""


SLOW_TOP = """
import time
while run._session.worker > 3 and '"joined"' not in (run.dir / "events.jsonl").read_text():
    time.sleep(0.001)
"""


def test_a_spare_is_there_from_the_start_and_takes_over(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """It has run the script's top before it is needed; another one follows it, whose top takes until then."""
    script = SCRIPT.replace('at("prepare")', SLOW_TOP).replace('at("batch")', WAITS)
    result = launch(tmp_path, script, *FLAT, "--spares", "1", args=(*SMALL, "1:5:forward"))
    check(result, undisturbed, tmp_path, 1)
    events = result.events()
    assert [e["worker"] for e in events if e["event"] == "joined"] == [3]
    assert [e["worker"] for e in events if e["event"] == "worker started"] == [0, 1, 2, 3, 4]
    assert result.summary["longest_gap_s"] < 1.0


def test_large_gradients_and_loader_processes(tmp_path: Path) -> None:
    want = learned(launch(tmp_path, SCRIPT, *FLAT, args=LARGE, name="undisturbed"))
    orders = ["1:0:total", "0:6:exchange", "2:13:forward"]
    check(launch(tmp_path, SCRIPT, *FLAT, args=(*LARGE, *orders)), want, tmp_path, 3)


def test_a_worker_that_is_told_to_go_is_replaced_and_a_coordinator_may_die_too(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """It leaves at a step's end, and the next step waits for the one that stands for it."""
    told = SCRIPT.replace("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15 if run.step == 5 else 9)")
    faults = ("--fault", "kill coordinator @step 12")
    result = launch(tmp_path, told, *FLAT, *faults, args=(*SMALL, "1:5:forward", "2:13:forward", "0:14:exchange"))
    check(result, undisturbed, tmp_path, 3)


APART = {
    "Gloo; the first step, at a meeting, while adding up": ["1:0:forward", "0:6:exchange", "2:13:total"],
    "Gloo; two at once, the newcomer too, between steps": ["0:4:forward", "2:4:batch", "3:4:exchange", "1:9:reduced"],
}


@pytest.mark.parametrize("moment", APART)
def test_over_groups_of_torch(tmp_path: Path, moment: str, undisturbed: dict[str, Any]) -> None:
    """Where some may have met and others not."""
    result = launch(tmp_path, SCRIPT, *FLAT, "--transport", "gloo", args=(*SMALL, *APART[moment]))
    check(result, undisturbed, tmp_path, len(APART[moment]))


HOLDS = """at("batch")
        import time
        while run.step == 20 and not (run.dir / "go").exists():
            time.sleep(0.001)
"""


def test_on_several_machines(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Workers of both; and then a machine with all that it has, for which another one comes."""
    orders = ["1:0:forward", "2:5:exchange", "0:9:total", "4:13:open"]
    given = f"width, loaders, *orders = {[*SMALL, *orders]}"
    script = SCRIPT.replace("width, loaders, *orders = sys.argv[1:]", given).replace('at("batch")', HOLDS)
    with machines.spread(tmp_path, script, 2, *FLAT, "--lease", "1.5") as run:
        run.wait_for_step(19)
        run.kill_machine(1)
        run.wait_for(lambda: not run.workers_on(1), "its loss")
        finish(run)
        run.wait_for(lambda: any("waits for a machine" in e["why"] for e in run.every("notice")), "that one is missing")
        last = run.join()
        result = ended(run)
        assert last.wait(60) == 0
        check(result, undisturbed, tmp_path, len(orders) + 1)
        machines.one_of_each(run)


BOTH = """
        if run.step == 6:
            for x, y in run.slots():
                at("share")
                while run.workers == 1 and run._session.next_term <= run._session.view.term:
                    time.sleep(0.001)   # a lost one's share: until another is about to come
                F.cross_entropy(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad(); scheduler.step()
            continue
        x, y = batch
"""


def test_a_loop_of_both_kinds_on_several_machines(tmp_path: Path) -> None:
    """Who comes for a flat loop's sake is let in at the end of a step that had run.slots(), and is handed the state there."""
    script = SCRIPT.replace("for x, y in loader:\n", f"for batch in loader:{BOTH}").replace(
        "import os", "import time, os"
    )
    script = script.replace("epochs(8)", "epochs(3)")
    flags = ("-n", "2", "--slots", "2")
    want = learned(launch(tmp_path, script, *flags, args=SMALL, name="undisturbed"))
    given = f"width, loaders, *orders = {[*SMALL, '1:6:share']}"
    with machines.spread(tmp_path, script.replace("width, loaders, *orders = sys.argv[1:]", given), 2, *flags) as run:
        result = ended(run)
        assert run.agents[0].wait(60) == 0
    assert learned(result) == want, result.err
    assert [event["event"] for event in result.events()].count("joined") == 1
    assert result.summary["recoveries"] == 1 and left_processes(str(tmp_path)) == []


SECOND = (
    "loss.backward()",
    'loss.backward(); optimizer.step(); optimizer.zero_grad(); at("second"); model(x).square().mean().backward()',
)
ACCUMULATES = (
    "optimizer.step(); optimizer.zero_grad()",
    "(optimizer.step(), optimizer.zero_grad()) if run.step % 2 else 0",
)


@pytest.mark.parametrize(
    ("change", "order", "words"),
    [
        pytest.param(SECOND, "1:3:second", "in the second backward of a flat loop's step", id="second backward"),
        pytest.param(ACCUMULATES, "1:3:forward", "gradients of an earlier backward were there", id="accumulated"),
    ],
)
def test_where_nobody_can_compute_the_share_it_says_what_to_do(
    tmp_path: Path, change: tuple[str, str], order: str, words: str
) -> None:
    result = launch(tmp_path, SCRIPT.replace(*change), *FLAT, args=(*SMALL, order))
    assert result.code == 2 and words in result.last_line, result.err
    assert "for x, y in run.slots():" in result.last_line and "paceline resume" in result.last_line
    assert left_processes(str(tmp_path)) == []


def test_a_flat_loop_that_is_scaled_down_says_what_to_add(tmp_path: Path) -> None:
    script = SCRIPT.replace("run.epochs(8)", "run.epochs(10_000)")
    with going(tmp_path, script, *FLAT, args=SMALL) as run:
        run.wait_for_step(3)
        assert paceline("scale", "--runs", "runs", "-n", "2", "it", cwd=tmp_path).returncode == 0
        result = ended(run)
    assert result.code == 2 and "a flat loop with 3 slots, and only 2 workers will be there" in result.last_line
