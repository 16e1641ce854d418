"""Habits of real scripts that once broke bits, hung or crashed: all at once, at one worker and at two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import launch, write_script

SCRIPT = """
import copy, os, sys, time, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
import paceline

run, wrong, drawn = paceline.init(), sys.argv[1], []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 3), nn.Linear(300, 300)
        self.register_buffer("mask", torch.full((3,), float("-inf")))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.last = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 4)
        if run.step >= 2 and len(self.grown) == 1:
            self.grown = torch.linspace(0.9, 1.1, 3)
        y = self.last(self.linear(x * self.table) * self.grown) / self.temperature
        if self.training:  # a buffer that is put in another's place
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y

class Items(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return X[index], Y[index]

class Draws(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(())

def collate(samples):
    drawn.append(float(torch.rand(())))
    x, y = default_collate(samples)
    return x + torch.randn(()), y

g = torch.Generator().manual_seed(1)
X, Y = torch.randn(64, 4, generator=g), torch.randint(0, 3, (64,), generator=g)
model = Model()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
optimizer.param_groups[0]["filter"] = lambda p: True
loader = DataLoader(Items(), batch_size=16, shuffle=True, collate_fn=collate)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(3):
    if epoch == 1 and len(optimizer.param_groups) == 1:  # not again in a worker that comes in this epoch
        optimizer.add_param_group({"params": list(model.last.requires_grad_(True).parameters()), "lr": 0.05})
    for batch in loader:
        if wrong == "killed" and run.step == 5 and run._session.worker == 1:
            os.kill(os.getpid(), 9)
        while wrong == "killed" and run.step == 7 and not run._session.board.next_term and run._session.view.term < 3:
            time.sleep(0.001)
        model.temperature = torch.tensor(1 + 0.1 * run.step)
        for x, y in run.slots():
            (F.cross_entropy(model(x), y) * 20).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.clamp_(-0.5, 0.5)
            if wrong == "evaluate inside the slots":
                run.evaluate(lambda batch: {"n": 1}, loader)
            if wrong == "leave both loops":
                break
        if wrong == "leave both loops":
            break
        copy.deepcopy(model)(x)
        if wrong == "closure":
            optimizer.step(lambda: model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
assert torch.isinf(model.mask).all(), model.mask
assert len(set(drawn)) == len(drawn), drawn
print("sum", run.evaluate(lambda batch: {"sum": float(batch.sum())}, DataLoader(Draws(), batch_size=8))["sum"])
"""


def test_bits_are_the_same_whatever_a_script_is_used_to(tmp_path: Path, alone: Alone) -> None:
    """A mask of -inf, a reassigned buffer, one assigned by hand, one filled by the first forward, one that grows, a layer that
    thaws into a group of its own, a random collate_fn, a clamp through .data, copies of the model, an evaluation that draws;
    and a kill."""
    script = write_script(tmp_path, SCRIPT)
    one, two = (
        alone(tmp_path, script, slots=2, args=("",)),
        launch(tmp_path, script, "-n", "2", "--slots", "2", args=("killed",)),
    )
    assert two.summary["recoveries"] == 1 and two.summary["workers"] == 2
    assert one.weights == two.weights
    said = [run.out.split("sum ")[1].split()[0] for run in (one, two)]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("evaluate inside the slots", "inside the loop over run.slots(); move it one level out"),
        ("leave both loops", "the inner loop over run.slots() was left early"),
        ("closure", "optimizer.step(closure) computes gradients out of reach"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, wrong: str, words: str, alone: Alone) -> None:
    script = write_script(tmp_path, SCRIPT)
    result = alone(tmp_path, script, slots=2, args=(wrong,))
    assert result.code == 2, result.err
    assert words in result.last_line and "train.py:" in result.last_line
