"""Workers at their own pace: every push counts once, whoever is killed; what of it the script sees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import BODY, HEAD, Result, ended, finish, going, launch, paceline

SUMS = Path(__file__).parents[2] / "benchmarks" / "sums.py"
EPOCHS = 2
STEPS = 50 * EPOCHS


def exact(done: Result, steps: int = STEPS) -> None:
    """The script itself compares its weights with the sum."""
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.summary["steps"] == steps
    proven = paceline("verify", "it", cwd=done.folder.parents[1])
    assert proven.returncode == 0, proven.stdout


def sums(folder: Path, *flags: str, pause: str = "0") -> Result:
    return launch(folder, SUMS, *flags, args=(str(EPOCHS), pause))


def test_every_push_counts_once_when_a_worker_main_a_server_and_the_coordinator_are_killed(tmp_path: Path) -> None:
    plan = ("kill worker:1 @step 15", "kill server:0 @step 30", "kill main @step 50", "kill coordinator @step 65")
    faults = [word for fault in plan for word in ("--fault", fault)]
    done = sums(tmp_path, "-n", "3", "--servers", "2", "--strategy", "async", *faults, pause="0.005")
    exact(done)
    happened = [event["why"] for event in done.events() if event["event"] == "fault"]
    assert happened == list(plan)


CODED = (
    SUMS.read_text()
    .replace(", dtype=torch.float64", "")
    .replace("1 << 20", "1 << 3")
    .replace(".double()", ".float()")
    .partition("if not run.stopped:")[0]
    + """
if run.is_main:
    with run._strategy.whole():
        kept = sum(run._strategy.capture()["kept"])
    assert bool(kept.any())
    for k, (part, mine) in enumerate(zip(model.parts, kept.split(5000))):
        off = (mine - part - (k + 1) * EPOCHS * numbers.sum()).unique()
        assert off.tolist() == [0.0], f"part {k} is off by {off.tolist()}"
"""
)


def test_what_a_codec_keeps_is_neither_lost_nor_counted_twice_whoever_is_killed(tmp_path: Path) -> None:
    """Whole numbers, of which a message has the largest: what was pushed and what is kept are exactly what was given."""
    plan = ("kill worker:1 @step 15", "kill server:0 @step 30", "kill main @step 50", "kill worker:2 @step 65")
    faults = [word for fault in plan for word in ("--fault", fault)]
    flags = ("-n", "3", "--servers", "2", "--strategy", "ssp:3+topk:0.01", *faults)
    done = launch(tmp_path, CODED, *flags, args=(str(EPOCHS), "0.005"))
    exact(done)
    assert [event["why"] for event in done.events() if event["event"] == "fault"] == list(plan)
    assert done.summary["compression"] < 0.02
    plain = 4 * 20_000 * STEPS * 3
    received = sum(load["received"] for load in done.summary["by_server"].values())
    assert received < 0.5 * plain, "what the servers have got, of the register and from each other too"


IN_THE_WAY = (
    SUMS.read_text()
    .replace(
        "        for (added,) in run.slots():",
        """
        if run._session.worker == 2 and _epoch not in stood and 5 <= run.step % 50 < 45:
            stood.add(_epoch)
            while in_hand() != {2}:
                time.sleep(0.001)
        for (added,) in run.slots():""",
    )
    .replace(
        "for _epoch in",
        """
from paceline.servers.messages import Hold
from paceline.servers.register import Register
stood = set()
def in_hand():
    return {*Register.decode(run._strategy._ask(Hold(run._session.worker, yes=False)).body).clocks.clocks}
for _epoch in""",
    )
)
"""Once in each epoch worker 2 keeps its micro-batch until all others were refused their next one."""


def test_staleness_stays_within_its_bound_beside_a_worker_that_is_four_times_slower(tmp_path: Path) -> None:
    plan = ("slow worker:2 x4", "kill server:1 @step 30")
    faults = [word for fault in plan for word in ("--fault", fault)]
    flags = ("-n", "3", "--servers", "2", "--strategy", "ssp:2", *faults)
    done = launch(tmp_path, IN_THE_WAY, *flags, args=(str(EPOCHS), "0.002"))
    exact(done)
    staleness = {int(k): count for k, count in done.summary["staleness"].items()}
    assert max(staleness) == 2, staleness
    assert sum(staleness.values()) >= STEPS * 4
    waits = done.summary["waits"]
    assert any(of.get("2", 0.0) > 0.0 for of in waits.values()), f"the slow one was waited for: {waits}"
    assert not any(worker in of for worker, of in waits.items()), f"nobody waits for itself: {waits}"
    pushed = 4 * 5000 * 8 * STEPS * 4  # at the least: each push goes to one server
    assert sum(load["received"] for load in done.summary["by_server"].values()) > pushed
    shown = paceline("show", "it", cwd=tmp_path).stdout
    assert re.search(r"staleness +pulls\n0 .*#\n1 ", shown) and re.search(r"waited for .*worker 2", shown), shown


@pytest.mark.parametrize(
    ("text", "strategy"), [(SUMS.read_text(), "ssp:2"), (CODED, "ssp:2+topk:0.01")], ids=["plain", "coded"]
)
def test_all_processes_are_killed_and_the_run_goes_on_from_a_checkpoint_with_others(
    tmp_path: Path, text: str, strategy: str
) -> None:
    """Also with what a codec had kept, of more workers than there are then."""
    flags = ("--slots", "4", "--servers", "2", "--strategy", strategy, "--checkpoint-every", "10")
    script = tmp_path / "train.py"
    script.write_text(text.replace("sys.argv[1]", "'3'").replace("if len(sys.argv) > 1", "if True"))
    doomed = Doomed(tmp_path, script, 3, flags)
    doomed.wait_for(lambda: len(list((doomed.folder / "checkpoints").glob("step-*/manifest.json"))) >= 2)
    doomed.kill()
    again = paceline("resume", "it", "-n", "2", "--servers", "1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    summary = json.loads((doomed.folder / "summary.json").read_text())
    exact(Result(0, again.stdout, again.stderr, doomed.folder, summary), 3 * 50)


def test_the_only_server_is_killed_and_no_push_counts_twice(tmp_path: Path) -> None:
    flags = ("-n", "2", "--servers", "1", "--strategy", "async", "--checkpoint-every", "10")
    done = sums(tmp_path, *flags, "--fault", "kill server:0 @step 60", pause="0.005")
    exact(done)
    assert done.summary["rollbacks"] == 1 and "trained again" in done.err


def test_servers_come_and_go_while_workers_push(tmp_path: Path) -> None:
    flags = ("-n", "2", "--servers", "1", "--strategy", "async")
    # Never so fast that it is over before the last server has gone, and no longer than that.
    crawls = "time.sleep(0.0 if (run.dir / 'go').exists() else 0.005 if run.step < 100 else 0.25)"
    script = SUMS.read_text().replace("time.sleep(PAUSE_S)", crawls)
    with going(tmp_path, script, *flags, args=("5",)) as run:
        run.wait_for_step(10)
        for servers, done in (("3", run.event("settled")), ("1", run.event("ending a server", server=2))):
            assert paceline("scale", "it", "--servers", servers, cwd=tmp_path).returncode == 0
            run.wait_for(done, f"--servers {servers}")
        finish(run)
        result = ended(run)
    exact(result, 5 * 50)


def test_a_worker_leaves_with_what_it_has_in_hand_done_and_another_comes(tmp_path: Path) -> None:
    """At a stretch's end; whoever comes later has never seen it."""
    script = SUMS.read_text().replace("time.sleep(PAUSE_S)", "time.sleep(0.0 if (run.dir / 'go').exists() else 0.005)")
    with going(tmp_path, script, "-n", "2", "--servers", "1", "--strategy", "ssp:2", args=("20",)) as run:
        run.wait_for_step(10)
        assert paceline("scale", "it", "-n", "1", cwd=tmp_path).returncode == 0
        run.wait_for(run.event("worker ended", worker=1, exit_code=0), "its leave")
        assert paceline("scale", "it", "-n", "2", cwd=tmp_path).returncode == 0
        run.wait_for(run.event("joined", worker=2), "another one")
        finish(run)
        result = ended(run)
    exact(result, 20 * 50)


TRAINS = (
    HEAD.replace("import torch,", "import sys\nimport torch,").replace("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()")
    + """
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
run.prepare(scheduler)
"""
    + BODY.replace("optimizer.zero_grad()", "optimizer.zero_grad(); scheduler.step(); seen.append(run.step)").replace(
        "for epoch", "seen = []\nfor epoch"
    )
    + """
    counts = run.evaluate(lambda batch: {"n": len(batch[0])}, DataLoader(data, batch_size=7))
    assert counts["n"] == 96
assert scheduler.last_epoch == 8 == run.step, (scheduler.last_epoch, run.step)
assert seen == sorted(seen), seen
"""
)


@pytest.mark.parametrize("strategy", ["async+dc:0.04+damp:0.5", "dssp:1,4"])
def test_a_schedule_follows_the_steps_of_the_run_and_all_end_with_the_same_weights(
    tmp_path: Path, strategy: str
) -> None:
    done = launch(tmp_path, TRAINS, "-n", "2", "--servers", "1", "--strategy", strategy, "--slots", "4")
    assert done.code == 0, done.err
    assert done.summary["steps"] == 8 and done.summary["samples"] == 192


def test_registered_modules_are_each_workers_own_and_the_run_says_so(tmp_path: Path) -> None:
    named = """
ema = torch.optim.swa_utils.AveragedModel(model)
run.register("ema", ema)
run.register("scaler", torch.amp.GradScaler(enabled=False))
"""
    flags = ("--servers", "1", "--strategy", "async", "--slots", "2")
    for workers, count in (("2", 1), ("1", 0)):
        done = launch(tmp_path, HEAD + named + BODY, "-n", workers, *flags, name=f"with-{workers}")
        assert done.code == 0, done.err
        told = [event["why"] for event in done.events() if "each worker has its own" in event["why"]]
        assert len(told) == count and all("'ema' (AveragedModel):" in why for why in told), told


def test_a_loop_that_is_left_early_is_left_by_all_before_they_meet(tmp_path: Path) -> None:
    script = TRAINS.replace("seen.append(run.step)", "seen.append(run.step)\n        if len(seen) % 3 == 0: break")
    script = script[: script.index("assert scheduler.last_epoch")]
    done = launch(tmp_path, script, "-n", "2", "--servers", "1", "--strategy", "async", "--slots", "2")
    assert done.code == 0, done.err
    assert done.summary["epochs"] == 2


def test_a_run_of_one_needs_no_server_process(tmp_path: Path, alone: Alone) -> None:
    done = alone(tmp_path, TRAINS, strategy="ssp:1", slots=2)
    assert done.code == 0, done.err


MISTAKES = {
    "evaluates inside the loop": (
        BODY + "        run.evaluate(lambda batch: {}, loader)\n",
        "inside the loop over the loader, where workers run at their own pace and cannot meet; move it behind the loop",
    ),
    "accumulates": (
        BODY.replace("optimizer.step(); optimizer.zero_grad()", "pass"),
        "a batch has ended with gradients and without optimizer.step()",
    ),
    "changes weights": (
        BODY.replace("optimizer.step();", "optimizer.step(); model[0].weight.data.clamp_(-0.01, 0.01);"),
        "the script has changed a weight of shape (16, 13) by itself",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_done_at_ones_own_pace_is_refused_in_a_sentence(tmp_path: Path, mistake: str) -> None:
    body, words = MISTAKES[mistake]
    done = launch(tmp_path, HEAD + body, "-n", "1", "--servers", "1", "--strategy", "async")
    assert done.code == 2 and words in done.last_line, done.err
