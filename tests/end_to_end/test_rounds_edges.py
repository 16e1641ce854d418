"""Replicas that train apart, where a loop begins or ends and where a run is resumed: the same weights whoever is killed there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import Result, launch, paceline, write_script

HEAD = """
import os, signal, sys, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
orders = sys.argv[1:]
me = run._session.worker
def die():
    os.kill(os.getpid(), 9)
model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(312, 13, generator=g), torch.randint(0, 4, (312,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
run.prepare(model, optimizer, loader)
"""
STEP = """
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
"""


def trained(folder: Path, script: str, strategy: str, *orders: str, flags: tuple[str, ...] = ()) -> Result:
    folder.mkdir()
    done = launch(folder, script, "-n", "3", "--strategy", strategy, *flags, args=orders)
    assert done.code == 0, f"{done.out}\n{done.err}"
    return done


BEHIND = f"""{HEAD}
for epoch in run.epochs(3):
    for x, y in loader:
{STEP}
        if run.step == 14 and me == 1 and orders:
            die()
        optimizer.step()
    print("the last loss", loss.item())
"""


@pytest.mark.parametrize("strategy", ["local:20", "diloco:4", "streaming:8,2,overlap=2", "gossip:4"])
def test_one_killed_in_a_loop_s_first_round_goes_on_in_that_loop(tmp_path: Path, strategy: str) -> None:
    """Not at the end of the one before, where names that only its body sets would not be there."""
    clean = trained(tmp_path / "clean", BEHIND, strategy)
    killed = trained(tmp_path / "killed", BEHIND, strategy, "die")
    assert killed.summary["recoveries"] == 1
    assert killed.weights == clean.weights


LEFT = f"""{HEAD}
held_out = DataLoader(data, batch_size=24)
for epoch in run.epochs(3):
    for x, y in loader:
{STEP}
        if run.step == 11 and me == 1 and orders:
            die()
        optimizer.step()
        if run.step + 1 >= 10 * (epoch + 1):
            break
    found = run.evaluate(lambda b: {{"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum")}}, held_out)
    if run.is_main:
        print("found", epoch, run.step, found["loss"])
"""


@pytest.mark.parametrize("strategy", ["local:50", "diloco:4+int8"])
def test_a_loop_that_all_have_left_is_not_entered_again(tmp_path: Path, strategy: str) -> None:
    clean = trained(tmp_path / "clean", LEFT, strategy)
    killed = trained(tmp_path / "killed", LEFT, strategy, "die")
    assert killed.summary["recoveries"] == 1 and killed.weights == clean.weights
    found = [[line for line in done.out.splitlines() if "found" in line] for done in (clean, killed)]
    assert len(found[0]) == 3 and found[0] == found[1]


STEPS_LEFT = f"""{HEAD}
for _ in run.steps(40):
    x, y = torch.randn(8, 13), torch.randint(0, 4, (8,))
    if True:
{STEP}
        optimizer.step()
    if run.step == 9:
        break
total = run.evaluate(lambda b: {{"count": len(b[1])}}, DataLoader(data, batch_size=24))["count"]
for _ in run.steps(20):
    x, y = torch.randn(8, 13), torch.randint(0, 4, (8,))
    if True:
{STEP}
        if run.step == 12 and me == 1 and orders:
            die()
        optimizer.step()
print(run.step, total)
"""


def test_neither_is_one_over_steps(tmp_path: Path) -> None:
    clean = trained(tmp_path / "clean", STEPS_LEFT, "local:50")
    killed = trained(tmp_path / "killed", STEPS_LEFT, "local:50", "die")
    assert killed.summary["recoveries"] == 1 and killed.summary["steps"] == clean.summary["steps"] == 20
    assert killed.weights == clean.weights


SECOND = STEPS_LEFT.replace("if run.step == 12 and me", "if run.step == 17 and me")


def test_nor_one_over_steps_of_those_before(tmp_path: Path) -> None:
    """Killed behind an exchange in the loop that follows."""
    clean = trained(tmp_path / "clean", SECOND, "local:4")
    killed = trained(tmp_path / "killed", SECOND, "local:4", "die")
    assert killed.summary["recoveries"] == 1 and killed.weights == clean.weights


TWO_LOADERS = HEAD.replace(
    "run.prepare(model, optimizer, loader)",
    """other = DataLoader(data, batch_size=24)
run.prepare(model, optimizer, loader, other)
held_out = DataLoader(data, batch_size=24)
def step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
for epoch in run.epochs(3):
    for number, (x, y) in enumerate(loader):
        step(x, y)
        if run.step + 1 == 17 * epoch + 5:
            break
    for x, y in other:
        if run.step == 17 + 5 + 6 and me == 1 and "die" in orders:
            die()
        step(x, y)
        if run.step == 17 + 5 + 2 and "stop" in orders and not run.resumed:
            run.stop("enough")
        if run.step + 1 == 17 * (epoch + 1):
            break
    run.evaluate(lambda b: {"count": len(b[1])}, held_out)
""",
)


@pytest.mark.parametrize("strategy", ["local:3", "diloco:4+int8"])
def test_a_loop_that_was_left_is_passed_over_behind_which_another_one_is_in_hand(tmp_path: Path, strategy: str) -> None:
    flags = ("--checkpoint-every", "1000")
    clean = trained(tmp_path / "clean", TWO_LOADERS, strategy, flags=flags)
    killed = trained(tmp_path / "killed", TWO_LOADERS, strategy, "die", flags=flags)
    assert killed.summary["recoveries"] == 1 and killed.weights == clean.weights
    stopped = trained(tmp_path / "it", TWO_LOADERS, strategy, "stop", flags=flags)
    assert stopped.summary["exit"] == "enough"
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path / "it")
    assert done.returncode == 0, done.stderr
    again = json.loads((stopped.folder / "summary.json").read_text())
    assert again["steps"] == clean.summary["steps"] == 51 and again["weights_sha256"] == clean.weights


ITS_OWN_PACE = f"""{HEAD}
for _ in run.steps(400):
    x, y = torch.randn(8, 13), torch.randint(0, 4, (8,))
    if True:
{STEP}
        if run.step >= 20 and me == 1:
            die()
        optimizer.step()
    if run.step >= 120:
        break
run.evaluate(lambda b: {{"count": len(b[1])}}, DataLoader(data, batch_size=24))
bodies = 0
for _ in run.steps(180):
    x, y = torch.randn(8, 13), torch.randint(0, 4, (8,))
    if True:
{STEP}
        optimizer.step()
    bodies += 1
    time.sleep(0.001)
(run.dir / f"bodies-{{me}}").write_text(str(bodies))
"""


def test_one_that_comes_in_at_its_own_pace_passes_over_no_loop(tmp_path: Path) -> None:
    """It has been in the one that they have left."""
    done = trained(tmp_path / "it", ITS_OWN_PACE, "async", flags=("--servers", "1"))
    assert done.summary["recoveries"] == 1
    assert sorted(path.name for path in done.folder.glob("bodies-*")) == ["bodies-0", "bodies-2", "bodies-3"]


BUSY = f"""{HEAD}
from paceline.state import places
seal = places._LocalDraft.seal
def waits(draft, manifest):
    while not (run.dir / "go").exists():
        time.sleep(0.001)
    seal(draft, manifest)
places._LocalDraft.seal = waits
asked = 0
def counting(states):
    def counted():
        global asked
        asked += 1
        return states()
    return counted
for epoch in run.epochs(3):
    if epoch == 0:
        run._feeding.loop.states = counting(run._feeding.loop.states)
    for x, y in loader:
{STEP}
        optimizer.step()
        if run.step == 12:
            assert asked == 3, asked
            (run.dir / "go").touch()
"""


def test_no_states_are_brought_together_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """One that falls due meanwhile is asked for once, and again when it can be had."""
    done = trained(tmp_path / "it", BUSY, "local:1", flags=("--checkpoint-every", "4", "--keep", "99"))
    assert len(list((done.folder / "checkpoints").glob("step-*"))) >= 3


RESUMED = f"""{HEAD}
if run._session.resume_from and me == 1:
    run._keeping._resume = lambda name: die()
for epoch in run.epochs(3):
    for x, y in loader:
{STEP}
        optimizer.step()
        if run.is_main and run.step == 1 and run.settings.servers:
            run.kv.wait(run.kv.push("mark", torch.full((3,), 7.0), "assign"))
        if run.step == 10 and "stop" in orders and not run.resumed:
            run.stop("enough")
        if run.step == 14 and run.is_main and run.settings.servers:
            assert run.kv.pull("mark").result(10).tensor.tolist() == [7.0] * 3
"""


@pytest.mark.parametrize(("strategy", "flags"), [("diloco:4+int8", ()), ("gossip:4", ("--servers", "1"))])
def test_one_killed_while_it_reads_the_checkpoint_begins_from_it_as_the_others_did(
    tmp_path: Path, strategy: str, flags: tuple[str, ...]
) -> None:
    """And keys of `run.kv` come back."""
    clean = trained(tmp_path / "clean", RESUMED, strategy, flags=("--checkpoint-every", "1000", *flags))
    stopped = trained(tmp_path / "it", RESUMED, strategy, "stop", flags=("--checkpoint-every", "1000", *flags))
    assert stopped.summary["exit"] == "enough"
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path / "it")
    assert done.returncode == 0, done.stderr
    again = json.loads((stopped.folder / "summary.json").read_text())
    assert again["recoveries"] == 1 and again["weights_sha256"] == clean.weights
    proven = paceline("verify", "it", cwd=tmp_path / "it")
    assert proven.returncode == 0, proven.stdout


LOST_AT_A_CHECKPOINT = f"""{HEAD}
how = HOW
while how == "asked to leave" and me == 3 and not (run.dir / "checkpoints" / "step-00000008" / "manifest.json").exists():
    time.sleep(0.001)  # its successor comes behind the checkpoint
for epoch in run.epochs(2):
    keep = run._feeding.loop._keep
    def dies():
        die() if run.step == 8 else keep()
    if how == "killed" and me == 1:
        run._feeding.loop._keep = dies
    for x, y in loader:
{STEP}
        optimizer.step()
        if how == "asked to leave" and run.step == 6 and not run.resumed:
            if me == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while run._session.next_term <= run._session.view.term:
                time.sleep(0.001)  # then all agree on it at the next exchange
        if run.step == 13 and how and run.is_main and not run.resumed:
            (run.dir / "there").touch()
            signal.pause()  # until all are killed
"""


@pytest.mark.parametrize("how", ["killed", "asked to leave"])
def test_a_checkpoint_has_each_replica_s_own_state_or_is_given_at_the_next_exchange(tmp_path: Path, how: str) -> None:
    """One is lost when it has met the others, and a checkpoint is due there; then all are."""
    flags = ("--strategy", "local:4", "--checkpoint-every", "8")
    clean = trained(tmp_path / "clean", LOST_AT_A_CHECKPOINT.replace("HOW", "''"), "local:4", flags=flags[2:])
    folder = tmp_path / "it"
    folder.mkdir()
    doomed = Doomed(folder, write_script(folder, LOST_AT_A_CHECKPOINT.replace("HOW", repr(how))), 3, flags)
    doomed.wait_for((doomed.folder / "there").exists)
    doomed.wait_for(lambda: bool(list((doomed.folder / "checkpoints").glob("step-*/manifest.json"))))
    doomed.kill()
    there = {path.parent.name for path in (doomed.folder / "checkpoints").glob("step-*/manifest.json")}
    assert there == {"step-00000012" if how == "killed" else "step-00000008"}
    again = paceline("resume", "it", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert json.loads((doomed.folder / "summary.json").read_text())["weights_sha256"] == clean.weights


def test_two_loops_over_prepared_loaders_at_once_are_refused(tmp_path: Path) -> None:
    script = HEAD.replace("run.prepare(model, optimizer, loader)", "other = DataLoader(data, batch_size=24)") + (
        "run.prepare(model, optimizer, loader, other)\n"
        "for epoch in run.epochs(1):\n"
        "    for (x, y), _ in zip(loader, other):\n" + STEP + "        optimizer.step()\n"
    )
    done = launch(tmp_path, script, "-n", "2", "--strategy", "local:4")
    assert done.code == 2 and "two loops over prepared loaders at once" in done.err


@pytest.mark.parametrize("strategy", ["streaming:10,2", "streaming:10,1,overlap=5", "diloco:10"])
def test_what_buffers_do_while_a_fragment_travels_counts(tmp_path: Path, strategy: str) -> None:
    script = BEHIND + "assert int(model[1].num_batches_tracked) == run.step == 39, model[1].num_batches_tracked\n"
    trained(tmp_path / "it", script, strategy)
    killed = trained(tmp_path / "killed", script, strategy, "die")
    assert killed.summary["recoveries"] == 1
