"""Replicas that train apart, on a machine that is lost: others of them go on elsewhere, with the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.launching import Result, ended, launch, paceline
from tests.end_to_end.machines import Spread, one_of_each, spread, summary_of
from tests.end_to_end.test_rounds import SCRIPT
from tests.etcd import Etcd

WHOLE = (
    SCRIPT.replace("294", "300")
    .replace("import os, sys", "import os, sys, time")
    .replace("os.kill(os.getpid(), 9)", "hold(order)")
    .replace(
        "def doomed(",
        """def hold(order):
    (run.dir / ("held-" + order.replace(":", "-"))).touch()
    while True:
        time.sleep(0.01)

def doomed(""",
    )
    .replace(
        """        doomed(loop._exchanges, "_said")""",
        """        if loop._copies is not None and loop._copies._courier is not None:
            doomed(loop._copies._courier, "_carry")
        doomed(loop._exchanges, "_said")""",
    )
)
"""With 4 replicas all have some of every batch. Who is doomed stops there, until its machine is killed."""


def alone(folder: Path, strategy: str, workers: int) -> Result:
    folder.mkdir()
    return launch(folder, WHOLE, "-n", str(workers), "--strategy", strategy)


def orders_of(script: str, *orders: str) -> str:
    return script.replace("sys.argv[1:]", repr(orders))


def lose(run: Spread, machine: int, *orders: str) -> None:
    """Once all who are doomed on it have come to where they stop."""
    for order in orders:
        held = run.folder / f"held-{order.replace(':', '-')}"
        run._wait(held.exists, f"worker {order[0]} at its place")  # the terminal may be gone
    run.kill_machine(machine)


def homes_of(run: Spread) -> dict[int, int]:
    return {event["worker"]: event["machine"] for event in run.every("worker started")}


@pytest.mark.parametrize("moment", ["delivered", "_said", "exchange", "_keep", "_carry"])
def test_a_machine_is_lost_and_its_replica_goes_on_on_another_one(tmp_path: Path, moment: str) -> None:
    """In mid-round; at an exchange; behind it, before the state is in the locker; before the copy of it is on the other machine."""
    clean = alone(tmp_path / "one", "diloco:5", 2)
    order = f"1:2:{moment}"
    with spread(tmp_path, orders_of(WHOLE, order), 2, "-n", "2", "--strategy", "diloco:5", "--lease", "1.5") as run:
        run.join()
        run.wait_for_event("machine", machine=2)
        lose(run, 1, order)
        done = ended(run)
        assert run.agents[1].wait(20) == 0
        assert homes_of(run) == {0: 0, 1: 1, 2: 2}
    assert done.weights == clean.weights
    assert done.summary["recoveries"] == 1 and done.summary["rounds"] == clean.summary["rounds"]
    assert done.summary["participants"] == {"2": clean.summary["rounds"]}
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0, proven.stdout


def test_a_worker_is_killed_and_its_replica_goes_on_on_an_emptier_machine(tmp_path: Path) -> None:
    """From the locker of the machine on which it was, which lives."""
    clean = alone(tmp_path / "one", "diloco:5", 4)
    order = "1:2:delivered"
    with spread(tmp_path, orders_of(WHOLE, order), 2, "-n", "4", "--strategy", "diloco:5") as run:
        run.join("--places", "2")
        run.wait_for_event("machine", machine=2)
        run._wait((run.folder / "held-1-2-delivered").exists, "worker 1 at its place")
        run.kill(1)
        done = ended(run)
        assert homes_of(run) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    assert done.weights == clean.weights


def test_a_machine_is_lost_with_two_replicas_that_exchange_beside_their_training(tmp_path: Path) -> None:
    """There is no place for them until another machine comes, to which the states go from the one that has the copies."""
    strategy = "streaming:8,2,overlap=2+int8"
    clean = alone(tmp_path / "one", strategy, 4)
    orders = ("2:4:exchange", "3:4:exchange")
    script = orders_of(WHOLE, *orders)
    flags = ("-n", "4", "--strategy", strategy, "--lease", "1.5", "--checkpoint-every", "5")
    with spread(tmp_path, script, 2, *flags) as run:
        lose(run, 1, *orders)
        run.wait_for(lambda: [e for e in run.every("notice") if "wait for a machine" in e["why"]], "its wait")
        run.join()
        done = ended(run)
        assert run.agents[1].wait(20) == 0
        assert homes_of(run) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert done.weights == clean.weights
    assert done.summary["participants"] == {"4": clean.summary["rounds"]}
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0, proven.stdout
    # Its checkpoints have every replica, wherever that was: on one machine a run goes on from them.
    shutil.copytree(run.folder / "checkpoints", clean.folder / "checkpoints")
    (clean.folder / "summary.json").unlink()
    again = paceline("resume", "it", cwd=tmp_path / "one")
    assert again.returncode == 0 and "going on from step" in again.stderr, again.stderr
    assert json.loads((clean.folder / "summary.json").read_text())["weights_sha256"] == done.weights


def test_the_first_machine_is_lost_and_then_the_one_that_had_its_copies(tmp_path: Path, etcd: Etcd) -> None:
    """The copies of what is left are made anew on the next machine, and one of them is what the second loss is survived by."""
    clean = alone(tmp_path / "one", "local:4", 3)
    orders = ("0:2:delivered", "1:2:_keep", "2:6:delivered")
    flags = ("-n", "3", "--strategy", "local:4", "--lease", "1.5", "--store", etcd.address)
    with spread(tmp_path, orders_of(WHOLE, *orders), 2, *flags) as run:
        run.join("--places", "3")
        run.wait_for_event("machine", machine=2)
        lose(run, 0, *orders[:2])
        run.wait_for_event("leading")
        lose(run, 1, orders[2])
        run.agents.pop(0).communicate()
        summary = summary_of(run)
        assert homes_of(run) == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2}
    assert summary["weights_sha256"] == clean.weights and summary["recoveries"] == 3
    assert one_of_each(run)


UNTIL_BACK = (
    WHOLE.replace("import os, sys", "import json, os, sys")
    .replace("run.epochs(3)", "run.epochs(2000)")
    .replace(
        "    scheduler.step()\n",
        """    scheduler.step()
    told = (run.dir / "events.jsonl").read_text()
    events = map(json.loads, told[: told.rfind("\\n")].splitlines())
    if {slot for event in events if event["event"] == "returned" for slot in event["slots"]} == {2, 3}:
        run.stop("they are back")
""",
    )
)


def test_replicas_that_were_dropped_with_their_machine_come_in_again_on_another_one(tmp_path: Path) -> None:
    orders = ("2:2:delivered", "3:2:exchange")
    flags = ("-n", "4", "--strategy", "diloco:4", "--on-death", "drop", "--drop-after", "0", "--lease", "1.5")
    with spread(tmp_path, orders_of(UNTIL_BACK, *orders), 2, *flags) as run:
        lose(run, 1, orders[0])
        run.wait_for_event("dropped")
        run.join()
        done = ended(run)
        assert run.agents[1].wait(20) == 0
    assert done.code == 0, done.err
    assert {lost["replica"] for lost in done.summary["dropped"]} == {2, 3}
    assert done.summary["samples"] == done.summary["epochs"] * 300
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0 and "exactly once" in proven.stdout, proven.stdout
