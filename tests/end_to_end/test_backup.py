"""ps+backup and central as processes: the same bits as all-reduce beside a slow worker, whoever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import BODY, HEAD, Result, launch, paceline, write_script
from tests.end_to_end.test_failures import left_processes
from tests.end_to_end.test_same_bits import flattened

EPOCHS = 6
STEPS = 4 * EPOCHS
TRAINS = """
import time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init(seed=5)
model = nn.Sequential(nn.Linear(13, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(92, 13, generator=g), torch.randint(0, 4, (92,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
run.prepare(model, optimizer, scheduler, loader)
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.slots():
            time.sleep(0.01)
            F.cross_entropy(model(x), y).backward()
        if run.step % 3 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step(); optimizer.zero_grad(); scheduler.step()
        run.log(lr=scheduler.get_last_lr()[0])
    counts = run.evaluate(lambda batch: {"n": len(batch[0])}, DataLoader(data, batch_size=7))
    assert counts["n"] == 92
""".replace("EPOCHS", str(EPOCHS))
BACKUP = ("-n", "4", "--strategy", "ps+backup:1", "--servers", "2")
SLOW = "slow worker:2 x4"


def faults(*plan: str) -> list[str]:
    return [word for fault in plan for word in ("--fault", fault)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
    """What all-reduce comes to."""
    return alone(tmp_path_factory.mktemp("reference"), TRAINS.replace("time.sleep(0.01)", "pass"), slots=4).weights


def check(done: Result, weights: str) -> None:
    assert done.weights == weights, done.err
    assert done.summary["steps"] == STEPS
    proven = paceline("verify", "it", cwd=done.folder.parents[1])
    assert proven.returncode == 0, proven.stdout
    assert left_processes(str(done.folder.parents[1])) == []


PLANS = {
    "a slow worker": (SLOW,),
    "main is slow": ("slow main x4",),
    "the slow worker is killed": (SLOW, "kill worker:2 @step 12"),
    "the worker that helps is killed": (SLOW, "kill main @step 12"),
    "a server is killed": (SLOW, "kill server:0 @step 12"),
    "a server and the slow worker are killed": (SLOW, "kill server:1 @step 12", "kill worker:2 @step 12"),
    "a server and the worker that helps are killed": (SLOW, "kill server:0 @step 12", "kill worker:0 @step 12"),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_bits_of_all_reduce(tmp_path: Path, plan: str, weights: str) -> None:
    done = launch(tmp_path, TRAINS, *BACKUP, *faults(*PLANS[plan]))
    check(done, weights)
    happened = [event["why"] for event in done.events() if event["event"] == "fault"]
    assert happened == list(PLANS[plan])


def test_fewer_workers_than_slots(tmp_path: Path, weights: str) -> None:
    flags = ("-n", "3", "--slots", "4", "--strategy", "ps+backup:2", "--servers", "1")
    check(launch(tmp_path, TRAINS, *flags, *faults("slow worker:0 x4")), weights)


def test_a_checkpoint_is_of_one_moment_though_main_is_slow(tmp_path: Path, weights: str) -> None:
    script = write_script(tmp_path, TRAINS)
    flags = [*BACKUP[2:], "--slots", "4", "--checkpoint-every", "6", *faults("slow main x4")]
    doomed = Doomed(tmp_path, script, 4, flags)
    doomed.wait_for((doomed.folder / "checkpoints" / "step-00000013" / "manifest.json").exists)
    doomed.kill()
    done = paceline("resume", "--runs", "runs", "it", "-n", "2", "--servers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((doomed.folder / "summary.json").read_text())["weights_sha256"] == weights


def test_one_who_comes_where_a_checkpoint_is_due(tmp_path: Path, weights: str) -> None:
    """The others meet about it: before it is one of them."""
    flags = ("-n", "2", "--slots", "4", "--spares", "1", "--strategy", "ps+backup:1", "--servers", "1")
    done = launch(tmp_path, TRAINS, *flags, "--checkpoint-every", "1", *faults("kill worker:1 @step 5"))
    check(done, weights)
    assert any(event["event"] == "joined" for event in done.events()), {event["event"] for event in done.events()}


def test_a_stop_that_a_slow_worker_asks_for_is_taken_by_all_at_one_step(tmp_path: Path) -> None:
    script = TRAINS.replace(
        "        run.log(",
        "        if run._session.worker == 2 and run.step == 10: run.stop('enough')\n        run.log(",
    )
    done = launch(tmp_path, script, *BACKUP, *faults(SLOW))
    assert done.summary["exit"] == "enough" or "worker 2" in done.summary["exit"], done.summary
    assert 11 <= done.summary["steps"] <= 20


REFUSED = {
    "a flat loop": (flattened(BODY), "a loop without run.slots() with --strategy ps+backup:1"),
    "two reduce points": (
        BODY.replace(
            "        optimizer.step();", "        for x, y in run.slots():\n            pass\n        optimizer.step();"
        ),
        "a second reduce point in a step with --strategy ps+backup:1",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_another_worker_cannot_compute_is_refused_in_a_sentence(tmp_path: Path, mistake: str) -> None:
    body, words = REFUSED[mistake]
    done = launch(tmp_path, HEAD + body, "-n", "2", "--strategy", "ps+backup:1")
    assert done.code == 2 and words in done.last_line, done.err


# central


def test_central_has_the_bits_of_all_reduce(tmp_path: Path, weights: str) -> None:
    done = launch(
        tmp_path, TRAINS.replace("time.sleep(0.01)", "pass"), "-n", "2", "--slots", "4", "--strategy", "central"
    )
    check(done, weights)
    assert [event["server"] for event in done.events() if event["event"] == "server started"] == [0]


def test_central_has_one_server(tmp_path: Path) -> None:
    done = launch(tmp_path, TRAINS, "-n", "2", "--strategy", "central", "--servers", "2")
    assert done.code == 2
    assert "--servers 2: --strategy central has all variables at one server" in done.last_line
