"""Replicas that train apart, on several machines."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.launching import WAITS, ended, finish, launch, paceline
from tests.end_to_end.machines import spread
from tests.end_to_end.test_rounds import BESIDE, SCRIPT

WHOLE = SCRIPT.replace("294", "300")  # so that 4 replicas have some of every batch


def test_pairs_trade_between_machines_and_a_lost_replica_changes_no_bit(tmp_path: Path) -> None:
    flags = ("-n", "4", "--strategy", "gossip:3")
    (tmp_path / "one").mkdir()
    alone = launch(tmp_path / "one", WHOLE, *flags)
    with spread(tmp_path, WHOLE, 2, *flags, "--fault", "kill worker:3 @step 20") as run:
        done = ended(run)
    assert done.code == 0, done.err
    assert done.summary["recoveries"] == 1 and done.weights == alone.weights


def test_replicas_on_two_machines_are_killed_while_their_exchange_goes_on_beside_the_training(tmp_path: Path) -> None:
    flags = ("-n", "4", "--strategy", "streaming:8,2,overlap=3")
    (tmp_path / "one").mkdir()
    alone = launch(tmp_path / "one", WHOLE, *flags)
    # One with its machine's sums in hand, and one who waits for what its leader brings.
    orders = ("2:1:commit", "1:3:open")
    script = (
        BESIDE.replace("294", "300")
        .replace("sys.argv[1:]", repr(orders))
        .replace(', doomed(fragment.reducer, "_met")', "")
    )
    with spread(tmp_path, script, 2, *flags) as run:
        done = ended(run)
    assert done.code == 0, done.err
    assert done.summary["recoveries"] == 2 and done.weights == alone.weights
    assert done.summary["participants"] == {"4": alone.summary["rounds"]}


def test_a_machine_is_lost_with_its_replicas_and_the_others_train_their_shares(tmp_path: Path) -> None:
    body = "optimizer.step(); run.log(loss=0.0)"
    script = WHOLE.replace(
        "optimizer.step()", f"{body}\n        while {WAITS} and not (run.dir / 'go').exists(): time.sleep(0.01)"
    )
    script = script.replace("import os, sys", "import os, sys, time").replace("run.epochs(3)", "run.epochs(11)")
    flags = ("-n", "4", "--strategy", "diloco:4", "--on-death", "drop", "--drop-after", "0.5", "--lease", "1.5")
    with spread(tmp_path, script, 2, *flags) as run:
        run.wait_for_step(95)
        run.kill_machine(1)
        finish(run)
        done = ended(run)
    assert done.code == 0, done.err
    assert len(done.summary["dropped"]) == 2 and done.summary["samples"] == 11 * 300
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0, proven.stdout
