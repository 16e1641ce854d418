"""SparseEmbedding in real runs: the same rows at any number of workers and servers, whoever is killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import Result, ended, finish, going, launch, paceline, write_script
from tests.end_to_end.test_failures import left_processes
from tests.end_to_end.test_servers import pid_of, settled

SLOTS = 6
PS = ("--strategy", "ps", "--slots", str(SLOTS))
HOLD = 20
SCRIPT = """
import sys, time, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
hold = int(sys.argv[1]) if len(sys.argv) > 1 else 0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = paceline.SparseEmbedding(7, optimizer="adam", lr=0.05)
        self.bags = paceline.SparseEmbedding(3, optimizer="adagrad", lr=0.1, pooling="mean", admission=2, expiry=9)
        self.top = nn.Linear(17, 1)
    def forward(self, ids):
        one = self.one(ids)
        again = self.one(ids[:, :1] + 1)   # a second call in a share, with some of the same ids
        return self.top(torch.cat([one.flatten(1), self.bags(ids * 7919)], 1)).squeeze(1) + again.sum((1, 2))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
g = torch.Generator().manual_seed(7)
ids = (torch.randn(115, 2, generator=g) * 20).long() + (1 << 62)
loader = DataLoader(TensorDataset(ids, (ids.sum(1) % 3 == 0).float()), batch_size=24, shuffle=True)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(5):
    for batch in loader:
        model.one.lr = 0.05 / (1 + run.step)
        for number in range(1 + (run.step % 4 == 1)):   # two reduce points in some steps
            for x, y in run.slots():
                F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(lr=model.one.lr)
        while hold and run.step >= hold and not (run.dir / "go").exists() and not run._session.board.next_term:
            time.sleep(0.001)
"""


def learnt(result: Result) -> tuple[str, str, int]:
    return result.weights, result.summary["rows_sha256"], result.summary["rows"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> tuple[str, str, int]:
    """What a run of one comes to, which has its rows in its own process."""
    found = learnt(alone(tmp_path_factory.mktemp("undisturbed"), SCRIPT, strategy="ps", slots=SLOTS))
    assert found[-1] > 50
    return found


@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (2, 2), (3, 1)])
def test_the_same_rows_at_any_number(
    tmp_path: Path, workers: int, servers: int, undisturbed: tuple[str, str, int]
) -> None:
    result = launch(tmp_path, SCRIPT, *PS, "-n", str(workers), "--servers", str(servers))
    assert learnt(result) == undisturbed
    assert left_processes(str(tmp_path)) == []


def test_one_slot_meets_nobody_and_learns_the_same_at_a_server(tmp_path: Path) -> None:
    flags = ("--strategy", "ps", "--slots", "1", "-n", "1", "--servers")
    one, two = (launch(tmp_path, SCRIPT, *flags, count, name=count) for count in ("1", "2"))
    assert learnt(one) == learnt(two)


def test_gradients_that_are_accumulated_over_steps(tmp_path: Path) -> None:
    script = SCRIPT.replace("optimizer.step();", "if run.step % 3 == 1: continue\n        optimizer.step();")
    one, two = (launch(tmp_path, script, *PS, "-n", count, "--servers", count, name=count) for count in ("1", "2"))
    assert learnt(one) == learnt(two)


def test_a_worker_and_a_server_are_killed(tmp_path: Path, seed: int, undisturbed: tuple[str, str, int]) -> None:
    draw = random.Random(f"{seed} sparse")
    step, worker, server = draw.randrange(1, HOLD - 3), draw.randrange(2), draw.randrange(2)
    print(f"worker {worker} and server {server} from step {step} on")
    with going(tmp_path, SCRIPT, *PS, "-n", "2", "--servers", "2", args=(str(HOLD),)) as run:
        first = pid_of(run, server)
        run.wait_for_step(step)
        run.kill(worker)
        os.kill(first, signal.SIGKILL)
        run.wait_for(settled(run, server), f"a layout without server {server}")
        run.wait_for(run.event("joined"), "a replacement")
        finish(run)
        result = ended(run)
    assert learnt(result) == undisturbed


def test_a_checkpoint_has_the_rows(tmp_path: Path, undisturbed: tuple[str, str, int]) -> None:
    script = write_script(tmp_path, SCRIPT.replace("sys.argv[1]", f"'{HOLD}'").replace("len(sys.argv) > 1", "True"))
    doomed = Doomed(tmp_path, script, 2, [*PS, "--servers", "2", "--checkpoint-every", "6"])
    doomed.wait_for((doomed.folder / "checkpoints" / "step-00000018" / "manifest.json").exists)
    doomed.kill()
    (doomed.folder / "go").touch()
    done = paceline("resume", "--runs", "runs", "it", "-n", "3", "--servers", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((doomed.folder / "summary.json").read_text())
    assert (summary["weights_sha256"], summary["rows_sha256"], summary["rows"]) == undisturbed


SUMS = '''
import hashlib, time, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
IDS, EPOCHS = 600, 6

class Sum(nn.Module):
    """Each row moves by the whole numbers of the samples; the dense part by what the rows are when they are read."""
    def __init__(self):
        super().__init__()
        self.rows = paceline.SparseEmbedding(16, optimizer="sgd", lr=1.0, init=0.0)
        self.top = nn.Linear(16, 1)
    def forward(self, numbers):
        rows = self.rows(torch.arange(IDS))
        return rows.sum() * numbers.sum() + self.top(rows.detach().mean(0)).tanh().sum()

model = Sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
numbers = torch.randint(1, 100, (80,), generator=torch.Generator().manual_seed(1)).float()
loader = DataLoader(TensorDataset(numbers), batch_size=8, shuffle=True)
run.prepare(model, optimizer, loader, loss="sum")
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for (mine,) in run.slots():
            time.sleep(0.003)
            model(mine).backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(done=run.step)
with torch.no_grad():
    off = (model.rows(torch.arange(IDS)) + EPOCHS * numbers.sum()).unique().tolist()
assert off == [0.0], f"rows are off by {off}"
dense = hashlib.sha256(model.top.weight.detach().numpy().tobytes()).hexdigest()
(run.dir / f"dense-{run._session.worker}").write_text(dense)
'''


def test_rows_that_are_read_behind_count_each_share_once_whoever_is_killed(tmp_path: Path) -> None:
    """The script itself compares its rows with the sum. Every share touches all 8 fragments."""
    plan = ("kill worker:1 @step 12", "kill server:0 @step 24", "kill coordinator @step 36", "kill main @step 48")
    faults = [word for fault in plan for word in ("--fault", fault)]
    flags = ("-n", "3", "--servers", "2", "--strategy", "ps+rows:2", "--slots", "4", *faults)
    done = launch(tmp_path, SUMS, *flags)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert [event["why"] for event in done.events() if event["event"] == "fault"] == list(plan)
    staleness = {int(missed): count for missed, count in done.summary["staleness"].items()}
    assert max(staleness) <= 2 and sum(staleness.values()) == done.summary["steps"] * 4 * 8, staleness
    dense = [path.read_text() for path in done.folder.glob("dense-*")]
    assert len(dense) == 3 and len({*dense}) == 1, "the dense part is in step"
    assert re.search(r"staleness +pulls\n0 ", paceline("show", "it", cwd=tmp_path).stdout)
    assert paceline("verify", "it", cwd=tmp_path).returncode == 0
    assert left_processes(str(tmp_path)) == []


def test_the_example_learns(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "ctr.py"
    arguments = ("--samples", "20000", "--ids", "2000", "--dim", "8", "--batch-size", "512")
    result = launch(tmp_path, example, "-n", "2", "--strategy", "ps", args=arguments)
    assert result.code == 0 and "rows of 2,000 ids" in result.out, result.err
    assert result.summary["metrics"]["auc"] > 0.7


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (("", ""), ("-n", "2"), "pass --strategy ps"),
        (("", ""), (*PS, "--precision", "fp16"), "use bf16"),
        (
            ("run.prepare(model, optimizer, loader)", "run.prepare(model, loader)"),
            PS,
            "none was given to run.prepare()",
        ),
        (("", ""), ("-n", "2", "--strategy", "allreduce+rows:3"), "only ps and central train the rows"),
    ],
    ids=["all-reduce", "fp16", "no optimizer", "bounded all-reduce"],
)
def test_what_cannot_be_is_told_in_one_line(
    tmp_path: Path, change: tuple[str, str], flags: tuple[str, ...], says: str
) -> None:
    result = launch(tmp_path, SCRIPT.replace(*change) if change[0] else SCRIPT, *flags)
    assert result.code == 2 and says in result.last_line and "Traceback" not in result.err, result.err
