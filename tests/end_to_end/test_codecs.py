"""Gradients that travel coded: the same bits at any worker count, through deaths and joins, and from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.state.checkpoint import Checkpoint, newest_good
from paceline.state.places import place
from paceline.state.snapshot import Snapshot
from tests.alone import Alone
from tests.end_to_end import machines
from tests.end_to_end.launching import PATIENCE_S, WAITS, ended, finish, launch, paceline
from tests.end_to_end.test_kills import SCRIPT, SLOTS, check, learned
from tests.tensors.arithmetic import same

CODED = SCRIPT.replace(
    """        if f"{run._session.worker}:{run.step}:open" in orders:""",
    """        if f"{run._session.worker}:{run.step}:gather" in orders:
            dies_inside("gather")
        if f"{run._session.worker}:{run.step}:open" in orders:""",
)
ORDERS = {
    "int8": ("3:6:gather", "0:9:second share", "hold:20:4", "1:30:second loop"),
    "powersgd:2": ("2:0:backward", "1:7:total", "hold:20:4", "0:40:reduced"),
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
    orders = ("2:0:backward", "0:9:second share", "hold:20:4", "1:30:second loop")
    faults = ("--fault", "kill server:0 @step 12", "--fault", "kill server:1 @step 35")
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
    assert "the run ends if a worker or a machine dies" in result.err


def test_a_death_on_several_machines_ends_the_run_behind_a_checkpoint_with_all_that_was_kept(
    tmp_path: Path, alone: Alone
) -> None:
    with machines.spread(tmp_path, machines.SCRIPT, 2, *SPREAD, "--checkpoint-every", "20") as run:
        run.wait_for_step(50)
        run.kill(3)
        _, err = run.process.communicate(timeout=PATIENCE_S)
        assert run.process.returncode not in (0, None)
    assert "with it what topk:0.1 had kept for its slots" in err and "paceline resume" in err
    script = machines.SCRIPT.replace(WAITS, "False")
    one = alone(tmp_path, script, slots=8, strategy=STRATEGY, checkpoint_every=20, keep=1000)
    newest = newest_good(str(run.folder / "checkpoints"), print)
    assert newest is not None
    mine, theirs = (
        Snapshot.read(Checkpoint(place(str(folder / "checkpoints")), newest.step).read()).tree
        for folder in (run.folder, one.folder)
    )
    (point,), (other) = mine["strategy"]["kept"], theirs["strategy"]["kept"][0]
    assert point[:4] == other[:4] == [0, 8, newest.step, True]
    assert all(same(row, want) for row, want in zip(point[4], other[4], strict=True))
    assert all(bool(row.any()) for row in point[4])
