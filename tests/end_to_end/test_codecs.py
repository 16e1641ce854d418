"""Gradients that travel coded: the same bits at any worker count, through deaths and joins, and from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.state.checkpoint import listed
from tests.alone import Alone
from tests.end_to_end import machines
from tests.end_to_end.launching import HEAD, WAITS, ended, finish, launch, paceline
from tests.end_to_end.test_kills import SCRIPT, SLOTS, check, learned
from tests.etcd import Etcd

CODED = SCRIPT.replace(
    """        if f"{run._session.worker}:{run.step}:open" in orders:""",
    """        if f"{run._session.worker}:{run.step}:gather" in orders:
            dies_inside("gather")
        if f"{run._session.worker}:{run.step}:open" in orders:""",
)
ORDERS = {
    "int8": ("3:6:gather", "0:9:second share", "hold:20:4", "1:26:second loop"),
    "powersgd:2": ("2:0:backward", "1:7:total", "hold:20:4", "0:28:reduced"),
}
"""Four workers become two, one comes, and one more dies."""


@pytest.mark.parametrize("codec", ORDERS)
def test_the_same_bits_whoever_dies(tmp_path: Path, codec: str, alone: Alone) -> None:
    """Each redone share goes on from what the last committed step has kept of it; a newcomer finds that where it is."""
    strategy = f"allreduce+{codec}"
    one = alone(tmp_path, CODED, slots=12, strategy=strategy, args=("small", "0"))
    orders = ORDERS[codec]
    flags = ("-n", "4", *SLOTS, "--strategy", strategy)
    check(launch(tmp_path, CODED, *flags, args=("small", "0", *orders)), learned(one), tmp_path, 3)


def test_servers_come_to_the_bits_of_allreduce_whoever_dies(tmp_path: Path, alone: Alone) -> None:
    """Also a server that has half of a step; its copy and a newcomer go on."""
    one = alone(tmp_path, CODED, slots=12, strategy="allreduce+topk:0.1", args=("small", "0"))
    orders = ("2:0:backward", "0:9:second share", "hold:20:4", "1:26:second loop")
    faults = ("--fault", "kill server:0 @step 12", "--fault", "kill server:1 @step 27")
    flags = ("-n", "4", *SLOTS, "--servers", "2", "--strategy", "ps+topk:0.1", *faults)
    done = launch(tmp_path, CODED, *flags, args=("small", "0", *orders))
    check(done, learned(one), tmp_path, 3)
    assert sum(event["event"] == "fault" for event in done.events()) == 2
    assert done.summary["compression"] < 12 / 4 * 0.2  # of a part, which is several messages
    assert 0 < done.summary["wire_bytes"] < sum(load["received"] for load in done.summary["by_server"].values())


# on several machines, where workers share no memory

STRATEGY = "allreduce+topk:0.1"
SPREAD = ("-n", "4", "--slots", "8", "--lease", "1.5", "--strategy", STRATEGY)


def test_the_same_bits_on_several_machines_while_workers_leave_and_come(tmp_path: Path, alone: Alone) -> None:
    """What was kept goes from those who leave to those who have their slots then, and to those who come."""
    one = alone(tmp_path, machines.SCRIPT.replace(WAITS, "False"), slots=8, strategy=STRATEGY)
    # A checkpoint at each step: at whichever a newcomer begins to follow, there is one.
    with machines.spread(tmp_path, machines.SCRIPT, 2, *SPREAD, "--checkpoint-every", "1") as run:
        run.wait_for_step(20)
        for workers in ("2", "4"):
            assert paceline("scale", "--runs", "runs", "it", "-n", workers, cwd=tmp_path).returncode == 0
            run.wait_for(lambda count=int(workers): len(run.workers_on(0)) + len(run.workers_on(1)) == count, workers)
        run.wait_for(run.event("joined", worker=5), "the second newcomer")
        finish(run)
        result = ended(run)
    assert result.weights == one.weights
    assert "after a worker's death it goes back to its newest checkpoint" in result.err


def test_a_death_on_several_machines_takes_the_run_back_to_a_checkpoint_with_all_that_was_kept(
    tmp_path: Path, alone: Alone
) -> None:
    """A worker's, and then a machine's: those that are left have fewer places, and come to the same bits."""
    one = alone(tmp_path, machines.SCRIPT.replace(WAITS, "False"), slots=8, strategy=STRATEGY)
    with machines.spread(tmp_path, machines.SCRIPT, 2, *SPREAD, "--checkpoint-every", "20") as run:
        # A disk may take longer for it than the steps do.
        run.wait_for(lambda: any(found.step > 40 for found in listed(str(run.folder / "checkpoints"))), "a checkpoint")
        run.kill(3)
        told = run.wait_for(run.event("rolled back"), "the way back")
        assert told["step"] > 40 and told["step"] % 20 == 1, "not at the end of an epoch, of 4 steps"
        run.wait_for(lambda: len(run.workers_on(0)) == len(run.workers_on(1)) == 2, "those who begin again")
        run.wait_for_step(90)
        run.kill_machine(1)
        run.wait_for(lambda: len(run.every("rolled back")) == 2, "the way back")
        finish(run)
        result = ended(run)
    assert result.weights == one.weights
    assert result.summary["rollbacks"] == 2 and result.summary["steps_redone"] > 0
    assert "what topk:0.1 had kept for its slots; the run goes back to its newest checkpoint" in result.err
    assert result.err.count("(the copy in memory)") == 2
    events = run.lines("events.jsonl")
    last = max(number for number, event in enumerate(events) if event["event"] == "rolling back")
    assert [event["machine"] for event in events[last:] if event["event"] == "worker started"] == [0, 0]
    machines.one_of_each(run)


@pytest.mark.parametrize("servers", [0, 2], ids=["allreduce", "ps"])
def test_the_first_machine_is_lost_with_its_disk(tmp_path: Path, servers: int, alone: Alone, etcd: Etcd) -> None:
    """Every machine has all that was kept in memory, as of the last checkpoint."""
    one = alone(tmp_path, machines.SCRIPT.replace(WAITS, "False"), slots=8, strategy=STRATEGY)
    strategy = ("--strategy", "ps+topk:0.1", "--servers", str(servers)) if servers else ("--strategy", STRATEGY)
    flags = (
        "-n",
        "4",
        "--slots",
        "8",
        "--lease",
        "1.5",
        *strategy,
        "--checkpoint-every",
        "20",
        "--store",
        etcd.address,
    )
    with machines.spread(tmp_path, machines.SCRIPT, 2, *flags) as run:
        run.wait_for(lambda: any(found.step > 40 for found in listed(str(run.folder / "checkpoints"))), "a checkpoint")
        run.kill_machine(0)
        shutil.rmtree(run.folder / "checkpoints")
        told = run.wait_for_event("rolled back")
        assert told["step"] > 40 and told["step"] % 20 == 1, "not at the end of an epoch, of 4 steps"
        summary = machines.summary_of(run)
    assert summary["weights_sha256"] == one.weights
    assert summary["rollbacks"] == 1


MAINS = (
    HEAD
    + """
import os, time
died, go = run.dir / "died", run.dir / "go"
run.prepare(model, optimizer, loader)
for epoch in run.epochs(30):
    for batch in loader:
        if run.is_main:
            if run.step == 0:
                run.kv.push("count", torch.zeros(1), "assign").result()
            assert run.kv.push_pull("count", torch.ones(1)).result().tensor.item() == run.step + 1
        else:
            run.kv
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step(); optimizer.zero_grad()
        if run.step % 10 == 0:
            run.log(loss=1.0 if run.is_main else 0.1)
        if run._session.worker == 3 and run.step == 43 and not died.exists():
            died.touch(); os.kill(os.getpid(), 9)
"""
)


def test_what_main_alone_knows_is_mains_in_every_machines_memory(tmp_path: Path) -> None:
    """Keys as they were when main had them, though it goes on; metrics that the others log otherwise and a target is held against."""
    flags = ("-n", "4", "--slots", "8", "--servers", "2", "--checkpoint-every", "20", "--target", "loss<=0.5")
    with machines.spread(tmp_path, MAINS, 2, *flags, "--strategy", "ps+topk:0.1") as run:
        result = ended(run)
    assert result.summary["steps"] == 120 and result.summary["rollbacks"] == 1, result.err
    assert "(the copy in memory)" in result.err


SLOW_DISK = (
    HEAD
    + """
import os
died = run.dir / "died"
run.prepare(model, optimizer, loader)
had = run._keeping._recorder.has_time
run._keeping._recorder.has_time = lambda step: step < 30 and had(step)
for epoch in run.epochs(30):
    for batch in loader:
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        if run.is_main and run.step == 43 and not died.exists():
            died.touch(); os.kill(os.getpid(), 9)
        optimizer.step(); optimizer.zero_grad()
"""
)


def test_a_state_in_memory_has_its_receipts(tmp_path: Path) -> None:
    """Those that main had not written when it died; the checkpoint on disk was still the one before."""
    flags = ("-n", "4", "--slots", "8", "--strategy", STRATEGY, "--checkpoint-every", "20")
    with machines.spread(tmp_path, SLOW_DISK, 2, *flags) as run:
        result = ended(run)
    (back,) = [event for event in result.events() if event["event"] == "rolled back"]
    assert back["step"] > 40
    done = paceline("verify", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
