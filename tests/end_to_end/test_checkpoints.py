"""Checkpoints of real runs: killed inside a write, on a disk that takes no more, at another address, exported."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.state.checkpoint import listed
from paceline.tensors.snapshot import Snapshot
from tests.end_to_end.killing import Doomed, unpublished
from tests.end_to_end.launching import HEAD, Result, launch, paceline, write_script
from tests.state.disk import small_disk
from tests.tensors.arithmetic import same

ROOT = Path(__file__).resolve().parents[2]

# Two optimizers, running statistics, an average, a scaler; layers large enough to be copied late.
GAN = """
import os, sys, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init(checkpoints=os.environ.get("TEST_CHECKPOINTS", ""))
maker = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 24))
judge = nn.Sequential(nn.Linear(24, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
average = torch.optim.swa_utils.AveragedModel(maker)
makes = torch.optim.AdamW(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
judges = torch.optim.RMSprop(judge.parameters(), lr=1e-3, momentum=0.5)
scaler = torch.amp.GradScaler("cpu", growth_interval=5)
g = torch.Generator().manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(160, 24, generator=g)), batch_size=16, shuffle=True)
run.prepare(maker, judge, makes, judges, loader)
run.register("average", average)
run.register("scaler", scaler)
for epoch in run.epochs(6):
    for batch in loader:
        for p in judge.parameters():
            p.data.clamp_(-0.2, 0.2)
        for (x,) in run.slots():
            fake = maker(torch.randn(len(x), 16)).detach()
            (judge(fake).mean() - judge(x).mean()).backward()
        judges.step(); judges.zero_grad()
        for (x,) in run.slots():
            scaler.scale(-judge(maker(torch.randn(len(x), 16))).mean()).backward()
        scaler.step(makes); scaler.update()
        makes.zero_grad(); judges.zero_grad()
        average.update_parameters(maker)
        run.log(scale=scaler.get_scale())
        EACH_STEP
digest = sum(p.detach().double().sum() for p in average.parameters()).item()
if run.is_main:
    print("average", digest.hex(), scaler.get_scale())
"""
SCRIPT = GAN.replace("EACH_STEP", "")
FLAGS = ("--slots", "5", "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    result = launch(folder, write_script(folder, SCRIPT), "-n", "1", "--slots", "5")
    return result.weights, result.out.split("average ")[1].strip()


def killed_in_a_write(folder: Path, address: Path, after: int) -> None:
    """A run of two, all of it killed while its main was in the middle of writing a checkpoint."""
    doomed = Doomed(folder, write_script(folder, SCRIPT), 2, FLAGS)
    doomed.wait_for(
        lambda: any(
            found.step >= after and (address / found.name / "manifest.json").exists() for found in listed(str(address))
        )
    )
    doomed.stop_main_when(lambda: unpublished(address))
    doomed.kill()


def resumed(folder: Path, workers: int, reference: tuple[str, str]) -> str:
    done = paceline("resume", "--runs", "runs", "it", "-n", str(workers), cwd=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "runs" / "it" / "summary.json").read_text())
    assert summary["weights_sha256"] == reference[0]
    assert done.stdout.split("average ")[1].strip() == reference[1], "registered state comes back too"
    return done.stderr


def test_all_killed_inside_a_write(tmp_path: Path, reference: tuple[str, str], seed: int) -> None:
    """What was not published is not there; at other worker counts the run goes on from the one before."""
    first = tmp_path / "first"
    first.mkdir()
    after = random.Random(seed).randrange(2, 40)
    killed_in_a_write(first, first / "runs" / "it" / "checkpoints", after)
    assert paceline("checkpoints", "--runs", "runs", "it", "--check", cwd=first).returncode == 0
    for workers in (1, 5):
        again = tmp_path / str(workers)
        shutil.copytree(first, again)
        job = json.loads((again / "runs" / "it" / "job.json").read_text()) | {"directory": str(again)}
        (again / "runs" / "it" / "job.json").write_text(json.dumps(job))
        resumed(again, workers, reference)
        assert not list((again / "runs" / "it" / "checkpoints").glob(".*")), "what was half-written is swept away"


def test_all_killed_inside_a_write_to_an_address(
    tmp_path: Path, reference: tuple[str, str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is renamed, the manifest makes a checkpoint: the one without is passed over, aloud."""
    monkeypatch.setenv("TEST_CHECKPOINTS", f"file://{tmp_path}/elsewhere")
    killed_in_a_write(tmp_path, tmp_path / "elsewhere" / "it", random.Random(seed).randrange(2, 40))
    assert not (tmp_path / "runs" / "it" / "checkpoints").exists()
    shown = paceline("checkpoints", "--runs", "runs", "it", cwd=tmp_path)
    assert shown.returncode == 1 and "never finished" in shown.stdout
    assert "never finished" in resumed(tmp_path, 3, reference)
    assert paceline("checkpoints", "--runs", "runs", "it", "--check", cwd=tmp_path).returncode == 0


def test_parameters_changed_through_data_early_in_the_next_step_are_not_in_it(tmp_path: Path) -> None:
    """The checkpoint's thread does nothing before they are changed: what it copied then would be wrong, and no counter tells."""
    script = write_script(
        tmp_path,
        """
import threading
from paceline.state.writer import Writer
changed, write = threading.Event(), Writer._write
Writer._write = lambda writer, *what: changed.wait(60) and write(writer, *what)
"""
        + HEAD.replace("13, 16", "13, 5000").replace("16, 4", "5000, 4")
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(1):
    for batch in loader:
        if run.step == 1:
            torch.save([p.detach().clone() for p in model.parameters()], "before.pt")
            for p in model.parameters():
                p.data.clamp_(-0.01, 0.01)
            changed.set()
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
""",
    )
    assert launch(tmp_path, script, "-n", "1", "--checkpoint-every", "1", "--keep", "9").code == 0
    first = listed(str(next(tmp_path.glob("**/checkpoints"))))[0]
    written = Snapshot.read(first.read()).tree["replica"]["tensors"]
    before = torch.load(tmp_path / "before.pt")
    assert first.step == 1 and max(tensor.abs().max() for tensor in before) > 0.01
    assert all(same(one, other) for one, other in zip(written, before, strict=True))


def test_a_full_and_a_read_only_disk_do_not_stop_a_run(
    tmp_path: Path, reference: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = f"""
        if run.is_main:
            if run.step == 1:
                sys.path.insert(0, {str(ROOT)!r})
                import shutil
                from pathlib import Path
                from paceline.state.checkpoint import listed
                from tests.state.disk import Disk
                disk = Disk(Path(sys.argv[1]), sys.argv[2] == "True")
            if run.step in (9, 29, 39, 49):
                run._keeping.settle()
                there = [found.check().step for found in listed(str(disk.path / "it"))]
                print("at step", run.step, there)
            if run.step == 9:
                for removed in (disk.path / "it").glob(".*.removed"):
                    shutil.rmtree(removed)  # else the next one is written over it, on a full disk too
                disk.fill()
            if run.step in (29, 49):
                disk.free()
            if run.step == 39:
                disk.make_read_only()
"""
    with small_disk(tmp_path / "disk", megabytes=12) as disk:
        monkeypatch.setenv("TEST_CHECKPOINTS", str(disk.path))
        script = GAN.replace("        EACH_STEP", trouble)
        result = launch(tmp_path, script, "-n", "2", *FLAGS, args=(str(disk.path), str(disk.mounted)))
        assert result.weights == reference[0]
        assert listed(str(disk.path / "it"))[-1].step >= 50, "it goes on once there is room"
    there = dict(re.findall(r"at step (\d+) (\[.*\])", result.out))
    assert there["9"] != "[]" and there["29"] == there["9"], "the old ones stay when the disk is full"
    assert there["39"] != there["29"] and there["49"] == there["39"], "and when it is read-only"
    warnings = [event["why"] for event in result.events() if event["event"] == "warning"]
    told = [why for why in warnings if "training goes on, older checkpoints stay" in why]
    assert len([why for why in told if "still being written" not in why]) >= 2, warnings


REFUSED = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

class Odd(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {"decay": 0.9, "fn": [lambda x: x]}

run = paceline.init()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(40, 3)), batch_size=4)
run.prepare(model, optimizer, loader)
run.register("ema", Odd(2, 2))
for epoch in run.epochs(1):
    for batch in loader:
        for (x,) in run.slots():
            model(x).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        print("step", run.step)
"""


def test_what_cannot_be_kept_is_refused_by_name_at_the_first_step(tmp_path: Path) -> None:
    result = launch(tmp_path, REFUSED, "-n", "1", "--checkpoint-every", "9")
    assert result.code == 2
    assert "has a function at registered.ema.fn[0]: only tensors and plain values" in result.err
    assert "step 0" in result.out and "step 1" not in result.out


# what is left for others


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that was stopped by its step limit: its last checkpoint has its last weights."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = ("--checkpoint-every", "4", "--steps", "8", "--fault", "kill main @step 9")
    return launch(folder, write_script(folder, SCRIPT), "-n", "1", *flags)


def test_a_fault_that_never_came_is_told(stopped: Result) -> None:
    assert "the fault 'kill main @step 9' never came: the run was over at step 8" in stopped.err


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_the_weights_can_be_exported(stopped: Result, name: str) -> None:
    cwd = stopped.folder.parents[1]
    done = paceline("checkpoints", "--runs", "runs", "it", "--export", name, cwd=cwd)
    assert done.returncode == 0 and done.stdout.endswith("of step 8\n"), done.stderr
    path = cwd / name
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert state["0.1.running_mean"].shape == (256,) and state["1.2.weight"].shape == (256, 256)
    assert paceline("hash", name, cwd=cwd).stdout.split()[0] == stopped.weights


def test_that_the_run_went_on_behind_what_is_exported_is_said(stopped: Result) -> None:
    done = paceline(
        "checkpoints", "--runs", "runs", "it", "--export", "earlier.pt", "--step", "4", cwd=stopped.folder.parents[1]
    )
    assert "of step 4; the run went on to step 8" in done.stdout


def test_what_cannot_be_exported_is_said(stopped: Result) -> None:
    cwd = stopped.folder.parents[1]
    done = paceline("checkpoints", "--runs", "runs", "it", "--export", "old.pt", "--step", "5", cwd=cwd)
    assert done.returncode == 2 and "no checkpoint of step 5; there are: " in done.stderr and "8" in done.stderr
    done = paceline("checkpoints", "--runs", "runs", "it", "--export", "old.zip", cwd=cwd)
    assert done.returncode == 2 and "must end in one of .safetensors" in done.stderr
    assert not list(cwd.glob("old.*"))


def test_none_good_is_a_clear_refusal_and_nothing_is_deleted(stopped: Result, tmp_path: Path) -> None:
    shutil.copytree(stopped.folder, tmp_path / "runs" / "it")
    shards = sorted((tmp_path / "runs").rglob("state-*.bin"))
    for shard in shards:
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 4
        shard.write_bytes(raw)
    quick = paceline("checkpoints", "--runs", "runs", "it", cwd=tmp_path)
    assert quick.returncode == 0 and "complete" in quick.stdout and "s ago" in quick.stdout
    checked = paceline("checkpoints", "--runs", "runs", "it", "--check", cwd=tmp_path)
    assert checked.returncode == 1 and checked.stdout.count("DAMAGED") == len(shards)
    for verb in (("resume",), ("checkpoints", "--export", "x.pt")):
        done = paceline(*verb, "--runs", "runs", "it", cwd=tmp_path)
        assert done.returncode == 2 and "can be read; nothing was" in done.stderr
    assert sorted((tmp_path / "runs").rglob("state-*.bin")) == shards
