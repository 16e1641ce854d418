"""Everything is killed at once; the run goes on from its newest good checkpoint, at another worker count."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.resume import refuse_what_trains_nothing
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.settings import Settings
from paceline.state.checkpoint import listed
from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import HEAD, ended, going, launch, paceline, write_script

SCRIPT = """
import os, time, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init()
model = nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(272, 13, generator=g), torch.randint(0, 4, (272,), generator=g))
loader = DataLoader(data, batch_size=32, shuffle=True)
run.prepare(model, optimizer, scheduler, loader)
run.register("average", average)
run.state.setdefault("best", 0.0)
for epoch in run.epochs(12):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        average.update_parameters(model)
        run.log(lr=scheduler.get_last_lr()[0])
        while run.step >= 105 and not run.resumed and os.path.exists("doomed"):
            time.sleep(0.001)   # its killer may be late
    run.state["best"] = max(run.state["best"], float(epoch))
assert run.state["best"] == 11.0
digest = sum(p.detach().double().sum() for p in average.parameters()).item()
if run.is_main:
    print("average", digest.hex(), run.resumed)
"""
FLAGS = ("--slots", "8", "--checkpoint-every", "7")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> tuple[str, str]:
    result = alone(tmp_path_factory.mktemp("reference"), SCRIPT, slots=8)
    return result.weights, result.out.split("average ")[1].split()[0]


def killed(folder: Path, workers: int, after: int) -> Path:
    """A run whose processes were all killed once it had logged this many steps and two checkpoints were there."""
    (folder / "doomed").touch()
    doomed = Doomed(folder, write_script(folder, SCRIPT), workers, FLAGS)
    checkpoints = str(doomed.folder / "checkpoints")
    doomed.wait_for(lambda: doomed.steps() >= after and len(listed(checkpoints)) >= 2)
    doomed.kill()
    return doomed.folder


@pytest.mark.parametrize("workers", [1, 3])
def test_all_killed_then_resumed_gives_the_same_bits(
    tmp_path: Path, reference: tuple[str, str], workers: int, seed: int
) -> None:
    dice = random.Random(seed * 10 + workers)
    folder = killed(tmp_path, 2, after=dice.randrange(8, 100))
    done = paceline("resume", "--runs", "runs", "it", "-n", str(workers), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_sha256"] == reference[0]
    assert done.stdout.split("average ")[1].split() == [reference[1], "True"], "registered state comes back too"
    assert summary["samples"] == 12 * 272 and summary["resumed"]
    assert "going on from step" in done.stderr


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, reference: tuple[str, str]) -> None:
    folder = killed(tmp_path, 2, after=30)
    newest = listed(str(folder / "checkpoints"))[-1]
    shard = Path(newest.address) / "state-0000.bin"
    shard.write_bytes(shard.read_bytes()[:-9])
    checked = paceline("checkpoints", "--runs", "runs", "it", cwd=tmp_path)
    assert checked.returncode == 1 and "DAMAGED" in checked.stdout and "complete" in checked.stdout
    done = paceline(
        "run", "--runs", "runs", "--name", "it", "--resume", "auto", "-n", "2", *FLAGS, "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stderr and "trying the one before" in done.stderr
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == reference[0]


def test_other_slots_are_refused(tmp_path: Path) -> None:
    folder = killed(tmp_path, 1, after=10)
    job = json.loads((folder / "job.json").read_text())
    job["flags"]["slots"] = 4
    (folder / "job.json").write_text(json.dumps(job))
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 2 and "written with slots 8, this run has 4" in done.stderr


AT_ITS_END = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

run = paceline.init(seed=1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
loader = DataLoader(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=4)
run.prepare(model, optimizer, scheduler, loader)
for epoch in run.epochs(4):
    LOSS
    for _ in loader:
        STOP
        while run.step == 12 and not any(Path(run._session.folder.checkpoints).glob("step-*")):
            time.sleep(0.001)
        for (x,) in run.slots():
            loss = model(x).sum()
            loss.backward()
        optimizer.step(); optimizer.zero_grad()
    scheduler.step()   # once an epoch, also in one that is entered at its end
    run.log(loss=loss.item())
"""
EVERY_10 = ("-n", "2", "--slots", "2", "--checkpoint-every", "10", "--keep", "9")
"""The script's epochs have 5 steps."""


def steps_written(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in listed(str(folder / "checkpoints"))]


SLOW_DISK = """
import threading
from paceline.state.recorder import Recorder
from paceline.state.writer import Writer
freed, published = {6: threading.Event(), 16: threading.Event()}, threading.Event()
tidy, finish = Writer._tidy, Recorder.finish

def slow_tidy(writer, step):
    published.set()
    if step in freed:
        freed[step].wait()
    tidy(writer, step)

def freeing_finish(recorder):
    freed[6 if run.step < 16 else 16].set()
    finish(recorder)

Writer._tidy, Recorder.finish = slow_tidy, freeing_finish
"""


def test_a_checkpoint_that_the_disk_had_no_time_for_is_made_up(tmp_path: Path) -> None:
    """Due at 11, had at 13; and the last, for which no later step could give one, waits for the disk."""
    at = "if run.step == 10 and run.is_main: published.wait()  # else it is told on both sides of that\n"
    at += "        if run.step in (12, 15): run._keeping.settle()"
    text = SLOW_DISK + AT_ITS_END.replace("LOSS", "").replace("STOP", at)
    every = ("-n", "2", "--slots", "2", "--checkpoint-every", "5", "--keep", "9")
    result = launch(tmp_path, text, *every)
    assert steps_written(result.folder) == [6, 13, 16, 20]
    told = [event["why"] for event in result.events() if event["event"] == "warning"]
    assert len(told) == 1 and "no checkpoint at step 11: the one before is still being written" in told[0], told


COUNTED = """
import torch
from torch import nn
import paceline

run = paceline.init(seed=1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
for step in run.steps(20):
    AT
    for _ in run.slots():
        model(torch.rand(2, 3)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_the_last_of_counted_steps_waits_for_the_disk_too(tmp_path: Path) -> None:
    """The one of step 5 is held until somebody waits for it."""
    text = SLOW_DISK.replace("{6:", "{5:").replace("6 if run.step < 16 else 16", "5") + COUNTED.replace("AT", "pass")
    result = launch(tmp_path, text, "-n", "1", "--checkpoint-every", "5", "--keep", "9")
    assert result.code == 0, result.err
    assert steps_written(result.folder) == [5, 20]


ITS_OWN_STATE = """
from paceline.state.recorder import Recorder
take, taking = Recorder.take, []

def noted_take(recorder, *what):
    taking.append(True)
    take(recorder, *what)
    taking.pop()

class Average:
    def state_dict(self):
        assert not taking, "the models are being copied, and this may put others in their place"
        return {}
    def load_state_dict(self, state): pass

Recorder.take = noted_take
run.register("average", Average())
"""


def test_nothing_of_the_scripts_runs_while_its_models_are_copied(tmp_path: Path) -> None:
    text = COUNTED.replace("AT", "pass").replace("run.prepare", ITS_OWN_STATE + "run.prepare")
    result = launch(tmp_path, text, "-n", "1", "--checkpoint-every", "5", "--keep", "9")
    assert result.code == 0 and steps_written(result.folder)[-1] == 20


def test_no_checkpoint_is_at_an_epochs_end_except_the_last(tmp_path: Path) -> None:
    """A name that only the body of the loop sets is there behind it, in a resumed run too."""
    held = 'while run.step == 14 and Path("held").exists(): time.sleep(0.001)  # until the fault has come'
    text = AT_ITS_END.replace("LOSS", "").replace("STOP", held)
    undisturbed = launch(tmp_path, text, *EVERY_10, name="undisturbed")
    want = undisturbed.weights
    assert steps_written(undisturbed.folder) == [11, 20]
    script = write_script(tmp_path, text)
    (tmp_path / "held").touch()
    faults = ("--fault", "kill everything @step 13")
    paceline("run", "--runs", "runs", "--name", "it", *EVERY_10, *faults, str(script), cwd=tmp_path)
    (tmp_path / "held").unlink()
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0 and "going on from step 11" in done.stderr, done.stderr
    assert "entered at its end" not in done.stderr
    summary = tmp_path / "runs" / "it" / "summary.json"
    before = summary.read_text()
    assert json.loads(before)["weights_sha256"] == want
    again = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert again.returncode == 2 and "run 'it' has finished" in again.stderr and summary.read_text() == before


def test_a_finished_run_is_given_more_epochs_from_inside_its_last_one(tmp_path: Path) -> None:
    text = AT_ITS_END.replace("LOSS", "").replace("STOP", "")
    want = launch(tmp_path, text, *EVERY_10, "--epochs", "5", name="undisturbed").weights
    folder = launch(tmp_path, text, *EVERY_10).folder
    assert steps_written(folder) == [11, 20]
    done = paceline("resume", "--runs", "runs", "it", "--epochs", "5", cwd=tmp_path)
    assert done.returncode == 0 and "going on from step 11" in done.stderr, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["weights_sha256"]) == (25, want)
    verified = paceline("verify", "it", "undisturbed", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout


def test_a_stop_at_an_epochs_end_is_kept_and_entered_there(tmp_path: Path) -> None:
    """The script has been told to set the name before its loop."""
    text = AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)")
    want = launch(tmp_path, text.replace("STOP", ""), *EVERY_10, name="undisturbed").weights
    stop = "if run.step == 9 and not run.resumed: run.stop('enough')"
    stopped = launch(tmp_path, text.replace("STOP", stop), *EVERY_10)
    assert stopped.summary["steps"] == 10 and steps_written(stopped.folder) == [10]
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0 and "epoch 2 is entered at its end" in done.stderr, done.stderr
    assert json.loads((stopped.folder / "summary.json").read_text())["weights_sha256"] == want


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ps", [6, 11, 16, 20]),
        ("local:2", [6, 12, 16, 20]),
        ("diloco:7", [7, 14, 15, 20]),
        ("streaming:4,2", [7, 13, 17, 20]),
    ],
)
def test_a_worker_that_comes_where_one_was_put_off_knows_so(tmp_path: Path, strategy: str, expected: list[int]) -> None:
    """Else it would wait where the others do not, or they for it. Where none is met within the next epoch, it is at an end."""
    dies = "if run._session.worker == 1 and run.step == 10: os.kill(os.getpid(), 9)"
    text = AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)").replace("STOP", f"run._keeping.settle()\n        {dies}")
    flags = (*EVERY_10[:4], "--checkpoint-every", "5", "--keep", "9", "--strategy", strategy)
    done = launch(tmp_path, "import os" + text, *flags)
    assert done.code == 0, done.err
    assert steps_written(done.folder) == expected


def test_a_run_is_given_more_steps_and_more_epochs(tmp_path: Path) -> None:
    text = AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)").replace("STOP", "")
    want = launch(tmp_path, text, *EVERY_10, "--epochs", "6", name="undisturbed").weights
    folder = launch(tmp_path, text, *EVERY_10, "--steps", "7").folder

    def resume(*flags: str) -> tuple[int, str, dict[str, Any]]:
        done = paceline("resume", "--runs", "runs", "it", *flags, cwd=tmp_path)
        return done.returncode, done.stderr, json.loads((folder / "summary.json").read_text())

    for flags in ((), ("--steps", "5")):
        code, err, summary = resume(*flags)
        assert (
            code == 2 and f"at step 7, and --steps {5 if flags else 7} ends it there" in err and summary["steps"] == 7
        )
    code, err, summary = resume("--steps", "12")
    assert (code, summary["exit"], summary["steps"]) == (0, "step limit 12 reached", 12), err
    code, err, summary = resume("--steps", "0")
    assert (code, summary["exit"], summary["steps"]) == (0, "finished", 20), err
    code, err, summary = resume("--epochs", "4")
    assert code == 2 and "pass --epochs with more than its 4" in err
    code, err, summary = resume("--epochs", "6")
    assert (code, summary["steps"], summary["weights_sha256"]) == (0, 30, want), err


@pytest.mark.parametrize("strategy", ["allreduce", "local:2", "async"])
def test_what_failed_behind_its_loop_is_finished(tmp_path: Path, strategy: str) -> None:
    """Its steps are done, and its result is not written yet. It ends as if it had not failed."""
    text = AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)").replace("STOP", "")
    flags = ("-n", "2", "--slots", "2", "--checkpoint-every", "2", "--steps", "6", "--strategy", strategy)
    want = launch(tmp_path, text, *flags, name="undisturbed").weights
    # Main writes the last one, on a disk that other tests keep busy too; who fails sooner ends the run, and that with it.
    wait = "while not (run.dir / 'checkpoints' / 'step-00000006').exists(): time.sleep(0.001)\n"
    failed = launch(tmp_path, f"{text}{wait}raise ValueError('evaluation')\n", *flags)
    assert failed.code == 1 and "evaluation" in failed.summary["exit"] and steps_written(failed.folder)[-1] == 6
    write_script(tmp_path, text + "if run.is_main: print('evaluated')\n")
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    summary = json.loads((failed.folder / "summary.json").read_text())
    assert done.returncode == 0 and "evaluated" in done.stdout, done.stderr
    assert (summary["exit"], summary["steps"]) == ("step limit 6 reached", 6) and "no step is left" in done.stderr
    assert strategy == "async" or summary["weights_sha256"] == want
    again = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert again.returncode == 2 and "--steps 6 ends it there" in again.stderr


def test_workers_at_their_own_pace_are_given_the_rest_of_an_epoch_that_was_cut_short(tmp_path: Path) -> None:
    text = AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)").replace("STOP", "")
    stopped = launch(tmp_path, text, *EVERY_10, "--strategy", "async", "--steps", "7")
    assert stopped.summary["steps"] == 7
    for limit, steps in (("9", 9), ("0", 20)):
        done = paceline("resume", "--runs", "runs", "it", "--steps", limit, cwd=tmp_path)
        summary = json.loads((stopped.folder / "summary.json").read_text())
        assert (done.returncode, summary["steps"], summary["samples"]) == (0, steps, 4 * steps), done.stderr
    assert "every one of 20 samples exactly once" in paceline("verify", "it", cwd=tmp_path).stdout


def test_workers_at_their_own_pace_end_at_a_nearer_limit(tmp_path: Path) -> None:
    text = (
        AT_ITS_END.replace("LOSS", "loss = torch.zeros(1)").replace("STOP", "").replace("batch_size=4", "batch_size=2")
    )
    stop = text.replace("for (x,)", "if run.step >= 4 and not run.resumed: run.stop('enough')\n        for (x,)")
    stopped = launch(tmp_path, stop, *EVERY_10, "--strategy", "async")
    assert 4 <= stopped.summary["steps"] < 8
    done = paceline("resume", "--runs", "runs", "it", "--steps", "8", cwd=tmp_path)
    summary = json.loads((stopped.folder / "summary.json").read_text())
    assert (done.returncode, summary["steps"], summary["samples"]) == (0, 8, 16), done.stderr


def test_what_a_resume_cannot_change_is_said(tmp_path: Path) -> None:
    done = paceline("resume", "it", "--slots", "2", cwd=tmp_path)
    assert done.returncode == 2 and "--slots stays what it was, as other bits would come out" in done.stderr
    assert "-n, --servers, --steps, --epochs, --seconds, --target" in done.stderr


def test_a_target_that_is_reached_is_not_trained_for_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "it")
    folder.write_json(folder.summary, {"exit": "target loss<0.5 reached", "epochs": 1})
    with pytest.raises(UsageError, match="has reached its target"):
        refuse_what_trains_nothing(folder, "step-00000009", Settings(target="loss < 0.5"), {})
    for again in (Settings(target="loss<0.4"), Settings()):
        refuse_what_trains_nothing(folder, "step-00000009", again, {})


def test_epochs_are_refused_where_they_add_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "it")
    in_rounds = Settings(strategy="federated:rounds=6,clients=4")
    folder.write_json(folder.summary, {"exit": "failed", "epochs": 2})
    refuse_what_trains_nothing(folder, "step-00000002", in_rounds, {})
    with pytest.raises(UsageError, match="--epochs 50 would change nothing: rounds=6 is part of the run's strategy"):
        refuse_what_trains_nothing(folder, "step-00000002", in_rounds, {"epochs": 50})
    for settings, done, why in (
        (in_rounds, 6, "rounds=6 is part of the run's strategy"),
        (Settings(), 0, "how far it goes is in its script"),
    ):
        folder.write_json(folder.summary, {"exit": "finished", "epochs": done})
        for given in ({"epochs": 50}, {"epochs": 1}, {}):
            with pytest.raises(UsageError, match=f"has finished.*{why}"):
                refuse_what_trains_nothing(folder, "step-00000006", settings, given)
    folder.write_json(folder.summary, {"exit": "finished", "epochs": 6})
    refuse_what_trains_nothing(folder, "step-00000006", Settings(strategy="federated:clients=4"), {"epochs": 7})


def test_rounds_that_a_script_asks_for_are_known_to_a_resume(tmp_path: Path) -> None:
    text = AT_ITS_END.replace("LOSS", "").replace("STOP", "").replace("    scheduler.step()", "    #")
    script = text.replace("seed=1", "seed=1, strategy='federated:rounds=2,clients=2'")
    done = launch(tmp_path, script, "-n", "1", "--servers", "1", "--checkpoint-every", "1")
    assert done.summary["exit"] == "finished", done.err
    again = paceline("resume", "--runs", "runs", "it", "--epochs", "50", cwd=tmp_path)
    assert again.returncode == 2 and "rounds=2 is part of the run's strategy" in again.stderr


TWO_LOOPS = (
    HEAD
    + """
import os, time
run.prepare(model, optimizer, loader)
again = run.dir / "again"
for count in (6, 6):
    for epoch in run.epochs(count):
        for batch in loader:
            for x, y in run.slots():
                if again.exists() and run._session.worker == 1 and run.step == 18:
                    os.kill(os.getpid(), 9)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step(); optimizer.zero_grad()
            if not again.exists() and run.step == 15:
                if run.is_main:
                    again.touch()
                run.stop("pause")
            while run.step == 20 and not (run._session.joining or run._session.board.next_term > 2):
                time.sleep(0.001)  # in the first loop: the newcomer goes on into the second
"""
)


def test_who_comes_into_a_resumed_run_resumes_it_no_second_time(tmp_path: Path, alone: Alone) -> None:
    one = alone(tmp_path, TWO_LOOPS.replace("run.stop", "str").replace("while", "while False and"), slots=6)
    launch(tmp_path, TWO_LOOPS, "-n", "3", "--slots", "6", "--checkpoint-every", "4", "--name", "it")
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "runs" / "it" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("joined") == 1
    assert json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())["weights_sha256"] == one.weights


def test_without_a_checkpoint_resume_says_what_to_do(tmp_path: Path) -> None:
    launch(tmp_path, write_script(tmp_path, SCRIPT), "-n", "1", "--steps", "2")
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 2 and "--checkpoint-every" in done.stderr
    assert (tmp_path / "runs" / "it" / "summary.json").exists(), "nothing was changed"


def test_a_run_that_goes_on_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "doomed").touch()
    with going(tmp_path, SCRIPT.replace("run.step >= 105", "run.step >= 40"), "-n", "2", *FLAGS) as run:
        run.wait_for_step(30)
        for again in (["resume", "it"], ["run", "--name", "it", "--resume", "auto", "-n", "2", "train.py"]):
            done = paceline(*again, cwd=tmp_path)
            assert (
                done.returncode == 2 and "run 'it' is under way" in done.stderr and "paceline attach it" in done.stderr
            )
        (tmp_path / "doomed").unlink()
        assert ended(run).summary["exit"] == "finished"
