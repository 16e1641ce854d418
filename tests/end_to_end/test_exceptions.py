"""An exception on one worker costs that worker; the same on a second one ends the run."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.end_to_end.launching import HEAD, Result, ended, launch, undisturbed
from tests.end_to_end.machines import spread
from tests.end_to_end.test_failures import left_processes

ORDERS = """
import os, signal, sys, time
orders = sys.argv[1:]   # WHO:STEP:MOMENT raises there; hold:STEP:TERM waits until that term is there or announced

class Sample:
    "Its repr has an address, which is another one on every worker."

here = [Sample() for _ in range(run._session.worker + 1)][-1]

def at(moment):
    who = run._session.worker
    if {f"{who}:{run.step}:{moment}", f"any:{run.step}:{moment}"} & set(orders):
        open("raised-at", "w").write(repr(time.time()))
        raise ValueError(f"cannot train on {here}")
    if f"own:{run.step}:{moment}" in orders:
        raise ValueError("no good: " + "x" * who)

def hold():
    for order in orders:
        if order.startswith(f"hold:{run.step}:"):
            while not run._session.board.next_term and run._session.view.term < int(order.split(":")[2]):
                time.sleep(0.001)
"""
SCRIPT = (
    HEAD
    + ORDERS
    + """
held_out = DataLoader(TensorDataset(torch.randn(20, 13, generator=g)), batch_size=5)
run.prepare(model, optimizer, loader)

def score(batch):
    at("evaluate")
    return {"sum": model(batch[0]).sum()}

for epoch in run.epochs(10):
    for batch in loader:
        at("batch")
        hold()
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            at(f"slot {run._stepper.slot}")
            at("share")
            loss.backward()
        at("optimizer")
        optimizer.step(); optimizer.zero_grad()
    run.evaluate(score, held_out)
    at("epoch")
    if "break:10" in orders and run.step >= 10:
        break
at("end")
"""
)
THREE = ("-n", "3", "--slots", "4")
weights = undisturbed(SCRIPT, slots=4)


def raised(result: Result) -> list[tuple[int, int, int]]:
    """Worker, step and slot of each exception that the run went on after."""
    return [(e["worker"], e["step"], e["slot"]) for e in result.events() if e["event"] == "raised"]


@pytest.mark.parametrize(
    ("order", "step"),
    [
        ("2:18:share", 18),
        ("1:18:optimizer", 18),
        ("1:20:evaluate", 20),
        ("0:18:share", 18),
    ],
)
def test_on_one_worker_alone(tmp_path: Path, weights: str, order: str, step: int) -> None:
    result = launch(tmp_path, SCRIPT, *THREE, args=(order,))
    assert result.weights == weights
    worker = int(order[0])
    assert [told[:2] for told in raised(result)] == [(worker, step)]
    assert (raised(result)[0][2] >= 0) == order.endswith("share")
    assert f"worker {worker} raised ValueError: cannot train on <__main__.Sample" in result.err
    log = result.folder / "logs" / f"worker-{worker}.log"
    assert re.search(rf"if another worker raises it there too, the run ends \(traceback: .*{log.name}\)", result.err)
    assert f"worker {worker} has ended after its exception; going on with 2 workers" in result.err
    assert "ValueError: cannot train" in log.read_text()
    assert result.summary["recoveries"] == 1
    assert left_processes(str(tmp_path)) == []


def ends_with_the_second(folder: Path, result: Result, step: int, slot: int) -> None:
    took = time.time() - float((folder / "raised-at").read_text())
    [(first, *place)] = raised(result)
    assert result.code == 1 and took < 5.0
    assert place == [step, slot]
    words = f"step {step}" + (f", slot {slot}" if slot >= 0 else "")
    failed = next(event for event in result.events() if event["event"] == "failed")
    assert failed["worker"] != first
    assert f"worker {failed['worker']}: ValueError: " in result.last_line
    assert f"(worker {first} raised it too, at {words})" in result.last_line
    assert "Traceback" in failed["trace"] and failed["trace"] in result.err
    assert str(result.summary["exit"]).startswith(f"failed: worker {failed['worker']}: ValueError: ")


def test_one_share_that_nobody_can_compute(tmp_path: Path) -> None:
    result = launch(tmp_path, SCRIPT, *THREE, args=("any:18:slot 2",))
    ends_with_the_second(tmp_path, result, 18, 2)
    assert left_processes(str(tmp_path)) == []


@pytest.mark.parametrize("moment", ["batch", "optimizer"])
def test_on_all_at_once(tmp_path: Path, moment: str) -> None:
    result = launch(tmp_path, SCRIPT, *THREE, args=(f"any:18:{moment}",))
    ends_with_the_second(tmp_path, result, 18, -1)
    assert left_processes(str(tmp_path)) == []


def test_on_all_at_once_in_other_words(tmp_path: Path) -> None:
    """The last of them has nobody who could go on: its own words end the run."""
    result = launch(tmp_path, SCRIPT, *THREE, args=("own:18:optimizer",))
    assert result.code == 1 and len(raised(result)) == 2
    [last] = {0, 1, 2} - {worker for worker, *_ in raised(result)}
    assert f"worker {last}: ValueError: no good: {'x' * last}" in result.last_line
    assert "no worker is left" not in result.err


def test_a_spare_takes_its_place(tmp_path: Path, weights: str) -> None:
    result = launch(tmp_path, SCRIPT, *THREE, "--spares", "1", args=("1:18:share", "hold:25:3"))
    assert result.weights == weights
    assert "worker 3 has joined" in result.err and [told[:2] for told in raised(result)] == [(1, 18)]


def test_on_another_machine(tmp_path: Path, weights: str) -> None:
    with spread(tmp_path, SCRIPT.replace("sys.argv[1:]", '["3:18:share"]'), 2, "-n", "4", "--slots", "4") as run:
        result = ended(run)
    assert result.weights == weights
    assert [told[:2] for told in raised(result)] == [(3, 18)]


def test_on_two_machines(tmp_path: Path) -> None:
    """The share goes from a worker of the second machine to one of the first."""
    with spread(tmp_path, SCRIPT.replace("sys.argv[1:]", '["any:18:slot 1"]'), 2, "-n", "2", "--slots", "2") as run:
        result = ended(run)
    ends_with_the_second(tmp_path, result, 18, 1)
    assert raised(result) == [(1, 18, 1)]


BAD_MACHINE = (
    HEAD
    + """
run.prepare(model, optimizer, loader)
steps = 0
for epoch in run.epochs(10**6):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        steps += 1
        if steps == 3 and run._session.worker:
            raise RuntimeError("this machine is broken")
"""
)


def test_not_again_and_again(tmp_path: Path) -> None:
    """Every replacement raises too, wherever it is by then."""
    result = launch(tmp_path, BAD_MACHINE, "-n", "2", "--slots", "4")
    assert result.code == 1 and [worker for worker, *_ in raised(result)] == [1, 2, 3]
    assert "worker 4: RuntimeError: this machine is broken (workers 1, 2 and 3 were lost" in result.last_line


WITHOUT_LEADER = (
    HEAD
    + """
import json, os, signal, time

def events(name):
    return [e for e in map(json.loads, (run.dir / "events.jsonl").read_text().splitlines()) if e["event"] == name]

def wait_for(name):
    while not (found := events(name)):
        time.sleep(0.001)
    return found[0]

run.prepare(model, optimizer, loader)
for epoch in run.epochs(10):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
            if run.step == 18 and run._stepper.slot == 2:
                {what}
        optimizer.step(); optimizer.zero_grad()
"""
)
ONE_DIES = """
                if run._session.worker in (1, 2) and run._session.view.term == 1:
                    os.kill(wait_for("standby")["leader"], signal.SIGKILL)
                    raise ValueError("nobody hears this yet")
"""
BOTH_DIE = """
                if run._session.view.term > 1:
                    os.kill(wait_for("standby")["leader"], signal.SIGKILL)
                    wait_for("leading")
                open("raised-at", "w").write(repr(time.time()))
                raise ValueError("bad sample")
"""


def test_the_next_leader_is_told(tmp_path: Path, weights: str) -> None:
    """The worker that has slot 2 raises when nobody leads."""
    result = launch(tmp_path, WITHOUT_LEADER.format(what=ONE_DIES.strip()), *THREE)
    assert result.weights == weights
    assert [told[1:] for told in raised(result)] == [(18, 2)]
    assert "the standby leads now" in result.err


def test_the_next_leader_knows(tmp_path: Path) -> None:
    """The leader dies between the first worker's exception and the second's."""
    result = launch(tmp_path, WITHOUT_LEADER.format(what=BOTH_DIE.strip()), *THREE)
    ends_with_the_second(tmp_path, result, 18, 2)
    assert [event["event"] for event in result.events() if event["event"] in ("raised", "leading", "failed")] == [
        "raised",
        "leading",
        "failed",
    ]


@pytest.mark.parametrize(
    ("flags", "orders"),
    [
        (("-n", "1", "--slots", "4"), ["0:18:share"]),
        (THREE, ["1:0:optimizer"]),
        (THREE, ["1:40:end"]),
        (THREE, ["break:10", "0:12:end"]),
    ],
    ids=["one worker", "before a step is done", "behind the loop", "behind a loop that was left"],
)
def test_what_ends_the_run_at_once(tmp_path: Path, flags: tuple[str, ...], orders: list[str]) -> None:
    result = launch(tmp_path, SCRIPT, *flags, args=tuple(orders))
    assert result.code == 1 and raised(result) == []
    assert f"worker {orders[-1][0]}: ValueError: cannot train on" in result.last_line
    assert "raised it too" not in result.last_line


def test_a_mistake_in_usage_ends_the_run_at_once(tmp_path: Path) -> None:
    text = SCRIPT.replace('at("optimizer")', "run.step == 18 and run._session.worker == 1 and run.prepare(3)")
    result = launch(tmp_path, text, *THREE)
    assert result.code == 2 and raised(result) == []
    assert "prepare() after training has begun" in result.last_line


BAD_SAMPLE = """
from torch.utils.data import Dataset
class Data(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, k):
        if k == 13 and run.epoch == 1:
            open("raised-at", "w").write(repr(time.time()))
            raise ValueError(f"sample {k} is broken")
        return torch.zeros(13), 0
loader = DataLoader(Data(), batch_size=24, shuffle=True, num_workers=LOADERS)
run.prepare("""


@pytest.mark.parametrize(("loaders", "flags"), [(0, THREE), (2, ("-n", "4", "--slots", "4"))])
def test_a_sample_that_cannot_be_read(tmp_path: Path, loaders: int, flags: tuple[str, ...]) -> None:
    """Its worker's loader process says so, and then, in other words, the worker that has its share next."""
    text = SCRIPT.replace("run.prepare(", BAD_SAMPLE.replace("LOADERS", str(loaders)), 1)
    result = launch(tmp_path, text, *flags)
    [(_, step, slot)] = raised(result)
    assert 4 <= step < 8 and slot >= 0
    ends_with_the_second(tmp_path, result, step, slot)
    assert "sample 13 is broken" in result.last_line


FLAT = (
    SCRIPT[: SCRIPT.index("for epoch")]
    + """
for epoch in run.epochs(10):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        at("forward")
        loss.backward()
        at("optimizer")
        optimizer.step(); optimizer.zero_grad()
"""
)
TWICE = FLAT.replace(
    "loss.backward()",
    "(loss / 2).backward()\n        at('between')\n        (F.cross_entropy(model(x), y) / 2).backward()",
)
ONE_SLOT_EACH = ("-n", "3", "--slots", "3")


def test_in_a_flat_loop(tmp_path: Path) -> None:
    clean = launch(tmp_path, FLAT, *ONE_SLOT_EACH, name="clean")
    result = launch(tmp_path, FLAT, *ONE_SLOT_EACH, args=("1:18:forward", "0:25:optimizer"))
    assert result.weights == clean.weights
    assert raised(result) == [(1, 18, -1), (0, 25, -1)]


def test_in_a_flat_loop_on_all(tmp_path: Path) -> None:
    result = launch(tmp_path, FLAT, *ONE_SLOT_EACH, args=("any:18:forward",))
    assert result.code == 1
    ends_with_the_second(tmp_path, result, 18, -1)


def test_in_a_flat_loop_whose_step_nobody_can_begin_again(tmp_path: Path) -> None:
    result = launch(tmp_path, TWICE, *ONE_SLOT_EACH, args=("1:18:between",))
    assert result.code == 1 and raised(result) == []
    assert "worker 1: ValueError: cannot train on" in result.last_line
