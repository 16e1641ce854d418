"""What a script can do with a run, through real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, environment, launch, paceline, write_script

TEST_SET = """
test = TensorDataset(torch.randn(50, 13, generator=g), torch.randint(0, 4, (50,), generator=g))
test_loader = DataLoader(test, batch_size=8)
def count(batch):
    x, y = batch
    return {"correct": (model(x).argmax(1) == y).sum(), "loss": F.cross_entropy(model(x), y, reduction="sum"), "count": len(y)}
"""


def test_evaluate_and_predict_count_each_sample_once(tmp_path: Path, alone: Alone) -> None:
    script = (
        HEAD
        + TEST_SET
        + BODY
        + """
sums = run.evaluate(count, test_loader)
assert model.training
outputs = run.predict(lambda batch: model(batch[0]), test_loader)
if run.is_main:
    model.eval()
    with torch.no_grad():
        assert outputs.shape == (50, 4)
        assert torch.allclose(outputs, model(test.tensors[0]), atol=1e-6)
    assert sums["correct"] == float((outputs.argmax(1) == test.tensors[1]).sum())
    print("sums", sums["count"], repr(sums["loss"]))
"""
    )
    lines = set()
    for result in (alone(tmp_path, script, slots=4), launch(tmp_path, script, "-n", "3", "--slots", "4")):
        assert result.code == 0, result.err
        line = next(line for line in result.out.splitlines() if "sums" in line).split("│")[-1].strip()
        assert line.startswith("sums 50.0 ")
        lines.add(line)
    assert len(lines) == 1


def test_fit_trains_like_the_loop(tmp_path: Path, alone: Alone) -> None:
    fit = (
        HEAD.replace("run = paceline.init()", "torch.default_generator.manual_seed(1)")
        + TEST_SET
        + """
run = paceline.fit(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, optimizer, loader, epochs=2,
                   evaluate=(lambda model, batch: count(batch), test_loader))
"""
    )
    loop = (
        HEAD.replace("run = paceline.init()", "torch.default_generator.manual_seed(1)")
        + "run = paceline.init()\n"
        + BODY
    )
    fitted = launch(tmp_path, fit, "-n", "2", "--slots", "4", name="fit")
    assert fitted.weights == alone(tmp_path, loop, slots=4).weights
    assert 0 <= fitted.summary["metrics"]["correct"] <= 1


@pytest.mark.parametrize(
    ("flags", "why", "steps"),
    [
        (("--target", "level>=2"), "target level>=2 reached", 4),
        (("--seconds", "0.001"), "time limit 0.001 s reached", 1),
    ],
)
def test_stop_rules(tmp_path: Path, flags: tuple[str, ...], why: str, steps: int) -> None:
    script = HEAD + BODY + "        run.log(level=run.step)\n"
    result = launch(tmp_path, script, "-n", "2", *flags)
    assert result.code == 0, result.err
    assert result.summary["exit"] == why and result.summary["steps"] == steps


def test_a_limit_of_steps(tmp_path: Path, alone: Alone) -> None:
    """As a flag, and of several workers, test_same_bits has it in all its runs."""
    result = alone(tmp_path, HEAD + BODY, steps=5)
    assert result.summary["exit"] == "step limit 5 reached" and result.summary["steps"] == 5


def test_an_agreed_stop_from_one_worker(tmp_path: Path) -> None:
    script = HEAD + BODY + "        if run.step == 2 and not run.is_main: run.stop('seen enough')\n"
    result = launch(tmp_path, script, "-n", "2")
    assert result.code == 0 and result.summary["steps"] == 4
    assert "on worker 1" in result.summary["exit"]


def test_own_batches_with_steps_and_slots_k(tmp_path: Path, alone: Alone) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer)
for step in run.steps(6):
    for _ in run.slots(5):
        ids = torch.randint(0, 96, (8,))
        F.cross_entropy(model(data.tensors[0][ids]), data.tensors[1][ids]).backward()
    optimizer.step(); optimizer.zero_grad()
"""
    )
    results = [alone(tmp_path, script), *(launch(tmp_path, script, "-n", n, name=n) for n in ("2", "3"))]
    assert len({result.weights for result in results}) == 1
    assert {result.summary["samples"] for result in results} == {30}


def test_a_step_of_one_share_reaches_the_workers_that_have_none(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + (
        """
run.prepare(model, optimizer)
for step in run.steps(5):
    for share in run.slots(1):
        ids = torch.randint(0, 96, (8,))
        F.cross_entropy(model(data.tensors[0][ids]), data.tensors[1][ids]).backward()
    optimizer.step(); optimizer.zero_grad()
"""
    )
    one, two = alone(tmp_path, script, slots=2), launch(tmp_path, script, "-n", "2", "--slots", "2")
    assert one.weights == two.weights and two.summary["samples"] == 5


def test_slots_k_over_a_loader_cuts_finer(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + BODY.replace("run.slots()", "run.slots(8)")
    one, two = alone(tmp_path, script, slots=2), launch(tmp_path, script, "-n", "2", "--slots", "2")
    assert one.weights == two.weights and one.summary["samples"] == 192


def test_weights_and_sums(tmp_path: Path, alone: Alone) -> None:
    """loss='sum' with summed losses equals the mean of means, scaled by the batch; run.weight counts tokens."""
    mean = HEAD + BODY
    summed = HEAD + BODY.replace("loader)", "loader, loss='sum')").replace(
        "F.cross_entropy(model(x), y)", "(F.cross_entropy(model(x), y, reduction='sum') / 24)"
    )
    weighed = HEAD + BODY.replace("            F.", "            run.weight(3.0 * len(x))\n            F.")
    want = alone(tmp_path, mean + "\nrun.save(model.state_dict(), 'mean.pt')", slots=2)
    assert want.code == 0
    for name, script in (("sum", summed), ("weighed", weighed)):
        got = launch(tmp_path, script + f"\nrun.save(model.state_dict(), '{name}.pt')", "-n", "2", name=name)
        assert got.code == 0, got.err
        import torch

        for a, b in zip(
            torch.load(tmp_path / "mean.pt").values(), torch.load(tmp_path / f"{name}.pt").values(), strict=True
        ):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_by_flag(tmp_path: Path, precision: str, alone: Alone) -> None:
    one = alone(tmp_path, HEAD + BODY, slots=4, precision=precision)
    two = launch(tmp_path, HEAD + BODY, "-n", "2", "--slots", "4", "--precision", precision)
    full = alone(tmp_path, HEAD + BODY, slots=4, name="full")
    assert one.weights == two.weights != full.weights


def test_peeking_costs_no_position(tmp_path: Path, alone: Alone) -> None:
    peek = "x, y = next(iter(loader)); assert len(loader) == 4 and x.shape == (6, 13), x.shape\n"
    script = HEAD + BODY.replace("for epoch", peek + "for epoch").replace(
        "    for batch", "    " + "next(iter(loader))\n    for batch"
    )
    want = alone(tmp_path, HEAD + BODY, slots=4)
    got = launch(tmp_path, script, "-n", "2", "--slots", "4", name="peek")
    assert got.weights == want.weights and got.summary["samples"] == 192


def test_streams_and_loaders_of_batches(tmp_path: Path, alone: Alone) -> None:
    stream = (
        HEAD
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(70):
            yield data.tensors[0][i] + 0.01 * torch.randn(13), data.tensors[1][i]
loader = DataLoader(Stream(), batch_size=6)
"""
        + BODY
    )
    batches = (
        HEAD
        + """
class Batches(torch.utils.data.Dataset):
    def __len__(self): return 11
    def __getitem__(self, i): return data.tensors[0][i:i + 4 + i % 3], data.tensors[1][i:i + 4 + i % 3]
loader = DataLoader(Batches(), batch_size=None, shuffle=True)
"""
        + BODY
    )
    for kind, script, samples in (("stream", stream, 140), ("batches", batches, 2 * sum(4 + i % 3 for i in range(11)))):
        one = alone(tmp_path, script, slots=3, name=f"{kind}-alone")
        three = launch(tmp_path, script, "-n", "3", "--slots", "3", name=kind)
        assert one.weights == three.weights
        assert one.summary["samples"] == three.summary["samples"] == samples


@pytest.mark.parametrize("split", ["rows", "1,2,3,6"])
def test_splits(tmp_path: Path, split: str, alone: Alone) -> None:
    one = alone(tmp_path, HEAD + BODY, slots=4, split=split)
    two = launch(tmp_path, HEAD + BODY, "-n", "2", "--slots", "4", "--split", split)
    assert one.weights == two.weights and one.summary["samples"] == 192


def test_first_weights_that_differ_are_made_equal_and_told(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + "import os\nif not run.is_main:\n    model[0].weight.data.add_(1)\n" + BODY
    result = launch(tmp_path, script, "-n", "2", "--slots", "2")
    assert result.weights == alone(tmp_path, HEAD + BODY, slots=2).weights
    assert "the first weights of worker 1 differed" in result.err


def test_replicas_that_drift_apart_are_an_error(tmp_path: Path) -> None:
    script = HEAD + BODY + "        with torch.no_grad(): model[0].bias.add_(run._session.worker)\n"
    result = launch(tmp_path, script, "-n", "2")
    assert result.code == 1 and "the final weights of worker 1 differ" in result.last_line


def test_settings_that_drift_apart_are_an_error(tmp_path: Path) -> None:
    script = HEAD + BODY + "        if not run.is_main: optimizer.param_groups[0]['lr'] = 0.5\n"
    result = launch(tmp_path, script, "-n", "2")
    assert result.code == 2 and "optimizer settings" in result.last_line and "worker 1" in result.last_line


def test_others_wait_until_main_has_reached_prepare_and_identical_lines_are_folded(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import os
if run.is_main:
    open("downloaded", "w").close()
assert os.path.exists("downloaded")
"""
        + BODY
        + "print('same everywhere')\n"
    )
    result = launch(tmp_path, script, "-n", "3", "--show", "all")
    assert result.code == 0 and ":0-2 │ same everywhere  (×3)" in result.out


def test_plain_python_and_one_launched_worker_agree(tmp_path: Path) -> None:
    path = write_script(tmp_path, HEAD + BODY)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(next((tmp_path / "runs").iterdir()).joinpath("summary.json").read_text())
    assert summary["weights_sha256"] == launch(tmp_path, path, "-n", "1").weights


def test_run_folder_and_verbs(tmp_path: Path) -> None:
    script = (
        HEAD
        + BODY
        + "        run.log(loss=0.5)\n    if run.is_main: print('epoch', epoch)\nrun.save(model.state_dict(), 'out.pt')\n"
    )
    result = launch(tmp_path, script, "-n", "2", "--seed", "4", "--epochs", "3", args=("--lr", "0.1"))
    assert result.code == 0, result.err
    for name in ("weights_sha256", "steps", "epochs", "samples", "wall_s", "samples_per_s", "workers", "slots", "threads",
                 "strategy", "metrics", "time_split", "terms", "recoveries", "exit"):  # fmt: skip
        assert name in result.summary
    config = json.loads((result.folder / "config.json").read_text())
    assert (
        config["settings"]["seed"] == 4
        and config["origins"]["seed"] == "flag"
        and config["origins"]["slots"] == "derived"
    )
    assert config["arguments"] == ["--lr", "0.1"]
    assert result.summary["exit"] == "finished" and result.summary["steps"] == 12, "three epochs, not the script's two"
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 12
    assert all("why" in event for event in result.events())
    assert "epoch 1" in (result.folder / "logs" / "worker-0.log").read_text()
    assert ":0 │ epoch 1" in result.out
    assert "it" in paceline("runs", cwd=tmp_path).stdout
    shown = paceline("show", "last", cwd=tmp_path).stdout
    assert result.weights in shown and "seed" in shown and "flag" in shown
    assert "epoch 1" in paceline("logs", "it", "--worker", "0", cwd=tmp_path).stdout
    assert paceline("hash", "out.pt", cwd=tmp_path).stdout.strip() == result.weights
    assert paceline("logs", "it", "--worker", "7", cwd=tmp_path).returncode == 2
    assert paceline("show", "nothing", cwd=tmp_path).returncode == 2


def test_dry_run_resolves_and_leaves_nothing(tmp_path: Path) -> None:
    script = HEAD.replace("init()", "init(threads=2, seed=9)") + BODY
    path = write_script(tmp_path, script)
    done = paceline("run", "-n", "4", "--seed", "3", "--dry-run", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if len(line.split()) == 3}
    assert rows["seed"] == ["3", "flag"] and rows["threads"] == ["2", "argument"] and rows["slots"] == ["4", "derived"]
    assert "batch 24 = 4 slots × 6" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_as_a_module_with_flags_of_its_own(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    write_script(package, "", "__init__.py")
    write_script(package, HEAD + BODY + "import sys\nif run.is_main: print('argv', sys.argv[1:])\n")
    done = paceline("run", "-n", "2", "-m", "pkg.train", "--seed", "x", "-n", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "argv ['--seed', 'x', '-n', '9']" in done.stdout


def test_help_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['paceline', '--help']\nfrom paceline.cli import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=30)
    assert done.returncode == 0, done.stderr
    assert "Train a script with N workers" in done.stdout


def test_a_notebook_cell_runs_as_a_script(tmp_path: Path) -> None:
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "paceline")
shell.run_cell_magic("paceline", "-n 2", {(HEAD + BODY + "print('from the cell')")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "from the cell" in done.stdout and "weights" in done.stdout
