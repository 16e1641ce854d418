"""Receipts of real runs: whatever dies, `paceline verify` proves every sample once, and finds what is not so."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.cli import cli
from paceline.data.receipts import DIGEST, STEP
from paceline.errors import UsageError
from paceline.state.ledger import read
from tests.alone import Alone
from tests.end_to_end import test_kills
from tests.end_to_end.launching import HEAD, launch, paceline
from tests.end_to_end.test_resume import killed

EPOCHS, PER_EPOCH, SAMPLES = 12, 5, 98
SLOTS = ("--slots", "12")
# The last batch has 2 samples for 12 slots.
SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
import paceline

class Numbers(Dataset):
    def __len__(self):
        return 98
    def __getitem__(self, k):
        return torch.full((3,), k / 98), k % 4

run = paceline.init()
model = nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Numbers(), batch_size=24, shuffle=True, num_workers=1)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(12):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""


def verify(*runs: Path) -> Result:
    return CliRunner(env={"COLUMNS": "250"}).invoke(cli, ["verify", *map(str, runs)], standalone_mode=False)


def outcome(*runs: Path) -> tuple[int, str]:
    result = verify(*runs)
    assert result.exception is None, result.exception
    return result.return_value, result.output


def steps_of(run: Path) -> list[int]:
    found: list[int] = read(run / "receipts").table()[:, STEP].tolist()
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Path:
    result = alone(tmp_path_factory.mktemp("alone"), SCRIPT, slots=12, name="alone")
    assert result.code == 0, result.err
    return result.folder


def test_runs_of_one_and_of_three_are_proven_and_the_same(tmp_path: Path, one: Path) -> None:
    three = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, name="three")
    assert three.code == 0, three.err
    code, said = outcome(one, three.folder)
    assert code == 0, said
    assert said.count("every one of 98 samples exactly once, each in its step") == 2
    assert said.count(f"{EPOCHS * SAMPLES:,}") == 2 and "0-11" in said
    assert "the same: alone and three trained the same samples (by id) in each of 60 steps" in said
    assert f"the same weights: {three.weights[:12]}" in said


def test_killed_at_random_steps(tmp_path: Path, one: Path, seed: int) -> None:
    dice = random.Random(seed)
    faults = [f"kill main @step {dice.randrange(2, 30)}", f"kill worker:2 @step {dice.randrange(2, 55)}"]
    print(faults)
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, "--fault", faults[0], "--fault", faults[1])
    assert result.code == 0 and result.summary["recoveries"], result.err
    assert outcome(one, result.folder)[0] == 0
    assert steps_of(result.folder) == list(range(EPOCHS * PER_EPOCH))


def test_two_mains_killed_between_the_commit_and_the_receipt(tmp_path: Path) -> None:
    """The second one in the last step: only the end of the run is left to write what it has not."""
    result = launch(
        tmp_path,
        test_kills.SCRIPT,
        "-n",
        "3",
        *SLOTS,
        args=("plain", "0", "0:7:reduced", f"1:{test_kills.STEPS - 1}:optimizer"),
    )
    assert result.code == 0 and result.summary["recoveries"] == 2, result.err
    code, said = outcome(result.folder)
    assert code == 0 and "every one of 168 samples exactly once" in said, said
    assert steps_of(result.folder) == list(range(test_kills.STEPS))


def test_everything_killed_and_resumed(tmp_path: Path, seed: int) -> None:
    folder = killed(tmp_path, 2, after=random.Random(seed).randrange(8, 100))
    code, said = outcome(folder)
    assert code == 0 and "has not come to its end" in said, "so far it is in order"
    done = paceline("resume", "--runs", "runs", "it", "-n", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code, said = outcome(folder)
    assert code == 0 and "resumed at step" in said and "every one of 272 samples exactly once" in said, said
    assert steps_of(folder) == list(range(12 * 9))


def test_a_run_that_was_stopped_and_then_tampered_with(tmp_path: Path, one: Path, alone: Alone) -> None:
    """With one slot, where nothing is reduced; the other run had twelve."""
    result = alone(tmp_path, SCRIPT, slots=1, steps=13, name="short")
    code, said = outcome(one, result.folder)
    assert "the run ended after batch 3 of 5: the 72 of 98 samples first in the order" in said
    assert code == 1 and "paceline: alone has 60 steps, short only 13" in said and said.count("paceline:") == 1

    (path,) = (result.folder / "receipts").iterdir()
    whole = path.read_bytes()
    record = 7 * 8
    at = len(whole) - 4 * record + DIGEST * 8  # step 9's
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    code, said = outcome(result.folder)
    assert (
        code == 1 and "short: step 9 (epoch 1, batch 4): 2 samples were delivered, but not those of this batch" in said
    )
    path.write_bytes(whole[: -2 * record - 3])
    done = paceline("verify", "--runs", "runs", "short", cwd=tmp_path)
    assert done.returncode == 1
    assert "short: steps 10-12 have no receipt: the run trained 13 steps" in done.stderr
    os.unlink(path)
    missing = verify(result.folder).exception
    assert isinstance(missing, UsageError) and "run 'short' has no receipts" in str(missing)


LOADERS = (
    HEAD
    + """
from torch.utils.data import IterableDataset

class Counting(IterableDataset):
    def __iter__(self):
        return iter(zip(torch.randn(10, 13), torch.arange(10) % 4))

stream = DataLoader(Counting(), batch_size=2)
chosen = DataLoader(data, batch_size=8, sampler=range(0, 96, 3))
run.prepare(model, optimizer, loader, stream, chosen)
for epoch in run.epochs(2):
    for source in (loader, stream, chosen):
        for batch in source:
            for x, y in run.slots(8 if source is loader else None):
                F.cross_entropy(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()
"""
)


def test_several_loaders_each_by_what_is_known_of_it(tmp_path: Path) -> None:
    result = launch(tmp_path, LOADERS, "-n", "3", "--slots", "4")
    code, said = outcome(result.folder)
    assert code == 0, said
    rows = [line.replace("│", "").split() for line in said.splitlines() if line.startswith("│")]
    assert [" ".join(row[:5]) for row in rows] == ["loader 0 0-1 8 192", "loader 1 0-1 4 20", "loader 2 0-1 8 64"]
    for row, words in zip(rows, ("each in its step", "items in turn, each once", "the sampler's choice"), strict=True):
        assert words in " ".join(row)


DRAWS = (
    HEAD
    + """
run.prepare(model, optimizer)
for step in run.steps(6):
    for number in run.slots(5 if step == 3 else None):
        model(torch.randn(4, 13)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
)


def test_own_draws(tmp_path: Path) -> None:
    result = launch(tmp_path, DRAWS, "-n", "2", "--slots", "4")
    code, said = outcome(result.folder)
    assert code == 0 and "every draw of each step once" in said and "25" in said, said
