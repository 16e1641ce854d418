"""The first hour's mistakes: one clear line each, exit code 2 (or a warning where training can go on)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, launch, paceline, write_script


def mistake(tmp_path: Path, script: str, *flags: str, args: tuple[str, ...] = ()) -> str:
    """Run it; check that it ended with 2 and one line, said once, without a traceback; return that line."""
    result = launch(tmp_path, script, *flags, args=args)
    assert result.code == 2, f"{result.code}\n{result.out}\n{result.err}"
    assert "Traceback" not in result.err + result.out
    assert (result.err + result.out).count(result.last_line[-60:]) == 1, f"{result.out}\n{result.err}"
    return result.last_line


def mistake_alone(alone: Alone, tmp_path: Path, script: str, **settings: int) -> str:
    """The same of a run of one by plain `python`, where most of them are found in the same way."""
    result = alone(tmp_path, script, **settings)
    assert result.code == 2, f"{result.code}\n{result.out}\n{result.err}"
    assert "Traceback" not in result.err + result.out
    return result.last_line


def test_init_never_called(tmp_path: Path) -> None:
    line = mistake(tmp_path, "print('hello')", "-n", "2")
    assert "without paceline.init()" in line


def test_workers_flag_after_the_script(tmp_path: Path) -> None:
    line = mistake(tmp_path, HEAD + BODY, args=("-n", "4"))
    assert "-n 4 stands after the script" in line and "paceline run -n 4 SCRIPT" in line


@pytest.mark.parametrize("where", ["before init", "after init", "from the environment"])
def test_script_starts_torch_distributed(tmp_path: Path, where: str) -> None:
    how = "" if where == "from the environment" else ", rank=0, world_size=1, store=dist.HashStore()"
    start = f"import torch.distributed as dist\ndist.init_process_group('gloo'{how})\n"
    script = start + HEAD + BODY if where == "before init" else HEAD + start + BODY
    line = mistake(tmp_path, script, "-n", "2")
    assert "train.py:" in line and "remove init_process_group" in line


def test_loader_not_prepared_nested(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + BODY.replace("optimizer, loader)", "optimizer)")
    for line in (mistake_alone(alone, tmp_path, script), mistake(tmp_path, script, "-n", "2")):
        assert "run.slots() outside a step" in line and "given to run.prepare()" in line


def test_loader_not_prepared_flat(tmp_path: Path, alone: Alone) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer)
for epoch in run.epochs(2):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
    )
    for line in (mistake_alone(alone, tmp_path, script), mistake(tmp_path, script, "-n", "2")):
        assert "train.py:16" in line and "was not given to run.prepare()" in line


@pytest.mark.parametrize(
    "loops",
    ["for batch, second in zip(loader, other): pass", "for batch in loader:\n        for second in other: pass"],
    ids=["zip", "nested"],
)
def test_two_prepared_loaders_at_once(tmp_path: Path, loops: str, alone: Alone) -> None:
    script = f"""
other = DataLoader(data, batch_size=12)
run.prepare(model, optimizer, loader, other)
for epoch in run.epochs(2):
    {loops}
"""
    line = mistake_alone(alone, tmp_path, HEAD + script)
    assert f"train.py:{15 + loops.count(chr(10))}: two loops over prepared loaders at once" in line
    assert "leave the other out of prepare()" in line


def test_a_sampler_that_deals_each_worker_others(tmp_path: Path) -> None:
    script = (
        HEAD + "loader = DataLoader(data, batch_size=24, sampler=[(i + run.rank) % 96 for i in range(96)])\n" + BODY
    )
    line = mistake(tmp_path, script, "-n", "2")
    assert "the sampler of loader 0 gives worker 1 other samples" in line and "set_epoch()" in line


def test_batch_smaller_than_slots(tmp_path: Path) -> None:
    line = mistake(tmp_path, HEAD + BODY, "-n", "2", "--slots", "32")
    assert "batch of 24 is smaller than the 32 slots" in line


def test_flat_loop_with_more_slots_than_workers_names_the_line(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
    )
    line = mistake(tmp_path, script, "-n", "2", "--slots", "4")
    assert "train.py:14" in line and "run.slots()" in line and "--slots 2" in line


def test_a_worker_leaves_the_loop_early(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        if run.step == 2 and not run.is_main:
            break
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
    )
    line = mistake(tmp_path, script, "-n", "2")
    assert "worker 1 is at the end of an epoch" in line and "left the loop over the loader at train.py:16" in line
    assert "worker 0 is at the gradients of step 2 (train.py:17)" in line


def test_more_workers_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = mistake(tmp_path, HEAD + BODY, "-n", "3")
    assert "3 workers for 1 GPU" in line and "--share-gpus" in line


def test_shared_memory_too_small_and_the_way_out(tmp_path: Path) -> None:
    line = mistake(tmp_path, HEAD + BODY, "-n", "2", "--shm-limit", "514K")
    assert "shared memory is too small" in line and "--transport gloo" in line and "2 workers need" in line
    result = launch(tmp_path, HEAD + BODY, "-n", "2", "--shm-limit", "514K", "--transport", "gloo", name="out")
    assert result.code == 0, result.err


def test_scheduler_not_prepared_is_a_warning(tmp_path: Path) -> None:
    script = HEAD + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n" + BODY
    result = launch(tmp_path, script, "-n", "1")
    assert result.code == 0, result.err
    assert "StepLR drives a prepared optimizer" in result.out
    assert any(event["event"] == "warning" for event in result.events())


EMA = "import copy\nema = copy.deepcopy(model)\nteacher = torch.optim.swa_utils.AveragedModel(model)\n"


def test_averages_that_a_replacement_would_begin_anew_are_a_warning(tmp_path: Path) -> None:
    result = launch(tmp_path, HEAD + EMA + BODY, "-n", "2")
    told = [event["why"] for event in result.events() if event["event"] == "warning"]
    assert result.code == 0 and len(told) == 2 and all("run.register('ema', …)" in why for why in told), told
    assert any(why.startswith("an AveragedModel like a prepared model") for why in told), told
    assert "train.py:16: UserWarning: paceline: an AveragedModel" in result.err + result.out
    assert "_begin_loop" not in result.err + result.out, "it is the script's line that is shown"
    given = EMA + "run.register('ema', ema)\nrun.register('teacher', teacher)\n"
    result = launch(tmp_path, HEAD + given + BODY, "-n", "2", name="given")
    assert result.code == 0 and not any(event["event"] == "warning" for event in result.events())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_another_model_than_the_prepared_one_is_a_warning(tmp_path: Path, workers: str) -> None:
    script = HEAD + "import copy\nother = copy.deepcopy(model)\n"
    body = BODY.replace("model(x)", "other(x)")
    result = launch(tmp_path, script + body, "-n", workers)
    assert "finds no gradient in any of its parameters" in result.out + result.err


def test_optimizer_not_prepared_is_a_warning(tmp_path: Path, alone: Alone) -> None:
    """Unless it trains something else, or is the run's by another way."""
    others = "apart = torch.optim.SGD(nn.Linear(1, 1).parameters())\nnamed = torch.optim.SGD(model.parameters())\n"
    body = BODY.replace("model, optimizer, ", "model, ").replace(
        "optimizer.step()", "optimizer.step(); apart.step(); named.step()"
    )
    result = alone(tmp_path, HEAD + others + "run.register('named', named)\n" + body, slots=2)
    assert result.code == 0, result.err
    (told,) = [event["why"] for event in result.events() if event["event"] == "warning"]
    assert told.startswith("train.py:20: this SGD changes prepared parameters but was not given to prepare()")
    assert told in result.err


def test_run_name_in_use(tmp_path: Path) -> None:
    (tmp_path / "runs" / "it").mkdir(parents=True)
    assert "a run named 'it' is in" in mistake(tmp_path, HEAD + BODY)


def test_unknown_strategy_lists_those_there_are(tmp_path: Path) -> None:
    line = mistake(tmp_path, HEAD + BODY, "--strategy", "telepathy")
    assert "unknown strategy 'telepathy'" in line and "allreduce" in line


def test_empty_data_set(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + "loader = DataLoader(TensorDataset(torch.empty(0, 13)), batch_size=4)\n" + BODY
    assert "is empty" in mistake_alone(alone, tmp_path, script)


def test_no_such_script(tmp_path: Path) -> None:
    done = paceline("run", "nowhere.py", cwd=tmp_path)
    assert done.returncode == 2 and "no such script: nowhere.py" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_optimizer_step_inside_the_inner_loop(tmp_path: Path, alone: Alone) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
"""
    )
    line = mistake_alone(alone, tmp_path, script)
    assert "train.py:17" in line and "move optimizer.step() one level out" in line


def test_inner_loop_left_early(tmp_path: Path, alone: Alone) -> None:
    script = (
        HEAD
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
            break
        optimizer.step()
"""
    )
    line = mistake_alone(alone, tmp_path, script, slots=4)
    assert "left early" in line and "train.py:15" in line


def test_more_workers_than_slots(tmp_path: Path) -> None:
    assert "4 workers for 2 slots" in mistake(tmp_path, HEAD + BODY, "-n", "4", "--slots", "2")


def test_a_run_of_one_by_plain_python_ends_with_2_too(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.end_to_end.launching import environment

    path = write_script(tmp_path, HEAD + BODY.replace("optimizer, loader)", "optimizer)"))
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "run.slots() outside a step" in done.stderr and "Traceback" not in done.stderr


def test_state_that_cannot_be_handed_over_is_refused_at_the_first_step(tmp_path: Path) -> None:
    script = HEAD + "import numpy\nrun.state['counts'] = numpy.zeros(2)\n" + BODY
    assert "the run's state has a ndarray at state.counts" in mistake(tmp_path, script, "-n", "2")


def test_a_trained_parameter_in_no_prepared_model(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + "optimizer.add_param_group({'params': nn.Linear(4, 2).parameters()})\n" + BODY
    line = mistake_alone(alone, tmp_path, script, slots=2)
    assert "train.py:14: the prepared SGD trains a parameter of shape (2, 4) (number 0 of its group 1)" in line


def test_a_second_prepare_keeps_the_kind_of_loss(tmp_path: Path, alone: Alone) -> None:
    one = HEAD + BODY.replace("loader)", "loader, loss='sum')", 1)
    two = HEAD + "run.prepare(model, optimizer, loss='sum')\n" + BODY.replace("model, optimizer, ", "")
    made = [alone(tmp_path, script, slots=2, name=name).weights for name, script in (("one", one), ("two", two))]
    assert made[0] == made[1] != alone(tmp_path, HEAD + BODY, slots=2, name="mean").weights


def test_an_exception_in_the_inner_loop_is_all_that_is_told(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + BODY.replace(".backward()", ".backward()\n            if run.step == 2: raise ValueError('my own')")
    result = alone(tmp_path, script, slots=2)
    assert result.code == 1 and "paceline: failed: 2 steps" in result.last_line
    assert result.err.count("Traceback") == 1 and "run.slots()" not in result.err.split("ValueError: my own")[1]
    assert result.summary["exit"] == "failed" and result.summary["steps"] == 2


def test_what_is_registered_behind_the_loops_begin_is_refused(tmp_path: Path) -> None:
    late = HEAD + BODY + "        if run.step == 2:\n            run.register('late', nn.Linear(1, 1))\n"
    result = launch(tmp_path, late, "-n", "2")
    assert result.code == 2 and "register('late') after training has begun" in result.err, result.err
