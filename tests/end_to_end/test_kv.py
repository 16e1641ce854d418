"""run.kv in real runs: workers, servers and what becomes of keys when one of them is killed."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from paceline.state.checkpoint import listed
from paceline.tensors.snapshot import Snapshot
from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import BODY, HEAD, ended, finish, going, launch, paceline, write_script
from tests.end_to_end.test_failures import left_processes
from tests.end_to_end.test_servers import pid_of, settled

COUNTS = """
import json, torch, paceline
run = paceline.init()
kv, keys = run.kv, [f"layer{k}" for k in range(8)]
ones = torch.ones(3000, dtype=torch.int64)
if run.is_main:
    for key in keys:
        kv.push(key, torch.zeros_like(ones), "assign")
    kv.push("rounds", torch.zeros(1, dtype=torch.int64), "assign")
kv.barrier()
rounds, last = 0, dict.fromkeys(keys, 0)
while rounds < 100 or not (run.dir / "go").exists():
    for key, (version, found) in zip(keys, kv.wait(*[kv.push_pull(key, ones) for key in keys])):
        assert found.min() == found.max() == version - 1 and version > last[key], key
        last[key] = version
    rounds += 1
    if rounds == 20:
        (run.dir / f"pushed-{run.rank}").touch()
kv.push("rounds", torch.tensor([rounds]))
kv.barrier()
if run.is_main:
    total = kv.pull("rounds").result().tensor.item()
    found = {key: [version, tensor.unique().tolist()] for key in keys for version, tensor in [kv.pull(key).result()]}
    (run.dir / "counted.json").write_text(json.dumps([total, found]))
kv.barrier()
"""


def check_counts(folder: Path) -> None:
    total, found = json.loads((folder / "counted.json").read_text())
    assert total >= 100
    assert found == {f"layer{k}": [total + 1, [total]] for k in range(8)}


def test_every_push_counts_once_though_each_server_is_killed(tmp_path: Path, seed: int) -> None:
    order = random.Random(f"{seed} keys").sample(range(2), 2)
    print(f"servers {order}")
    with going(tmp_path, COUNTS, "-n", "2", "--servers", "2") as run:
        for rank in range(2):
            run.wait_for((run.folder / f"pushed-{rank}").exists, "pushes")
        for server in order:
            os.kill(pid_of(run, server), signal.SIGKILL)
            run.wait_for(settled(run, server), f"a layout without server {server}")
        finish(run)
        result = ended(run)
    assert result.code == 0, result.err
    check_counts(result.folder)
    assert left_processes(str(tmp_path)) == []


def test_the_only_copy_is_lost_and_all_begins_again(tmp_path: Path) -> None:
    with going(tmp_path, COUNTS, "-n", "2", "--servers", "1") as run:
        run.wait_for((run.folder / "pushed-0").exists, "pushes")
        os.kill(pid_of(run, 0), signal.SIGKILL)
        (run.folder / "go").touch()
        result = ended(run)
    assert result.code == 0, result.err
    assert "server 0 was killed by SIGKILL" in result.err
    check_counts(run.folder)
    assert left_processes(str(tmp_path)) == []


def test_alone_and_without_servers(tmp_path: Path, alone: Alone) -> None:
    """A process of its own holds its keys itself; a run needs servers for that, and says so."""
    done = alone(tmp_path, COUNTS.replace('not (run.dir / "go").exists()', "False"))
    assert done.code == 0, done.err
    check_counts(done.folder)
    result = launch(tmp_path, COUNTS, "-n", "2")
    assert result.code == 2 and "train.py:4: run.kv keeps its keys at servers" in result.last_line, result.err
    assert "add --servers 1 to the command" in result.last_line


WAITS = """
import os, time, torch, paceline
run = paceline.init()
kv, worker = run.kv, run._session.worker
if run.is_main:
    kv.push("w", torch.zeros(1), "assign")
kv.barrier()
kv.wait(kv.push("w", torch.ones(1)))
(run.dir / f"pushed-{worker}").touch()
while worker == 1:
    time.sleep(0.01)
kv.barrier()
(run.dir / f"{run.workers} of us, {int(kv.pull('w').result().tensor)} pushed").touch()
"""


def test_a_barrier_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    """The push of the dead one counts; the one that comes in its place has nothing to come into, and disturbs nobody."""
    with going(tmp_path, WAITS, "-n", "2", "--servers", "1") as run:
        run.wait_for((run.folder / "pushed-0").exists, "worker 0's push")
        run.wait_for((run.folder / "pushed-1").exists, "worker 1's push")
        run.kill(1)
        result = ended(run)
    assert result.code == 0, result.err
    assert (result.folder / "1 of us, 2 pushed").exists()
    assert not (result.folder / "pushed-2").exists()
    assert left_processes(str(tmp_path)) == []


STOPS = """
import torch, paceline
run = paceline.init()
for number in range(10):
    if number == 4 and run.rank == 1:
        run.stop("enough")
    run.kv.barrier()
    if run.stopped:
        break
assert number == 4, number
"""


def test_a_stop_is_agreed_on_at_a_barrier(tmp_path: Path) -> None:
    result = launch(tmp_path, STOPS, "-n", "2", "--servers", "1")
    assert result.code == 0 and result.summary["exit"] == "run.stop() on worker 1", result.err


BESIDE = (
    "import time"
    + HEAD
    + BODY.replace(
        "run.prepare(model, optimizer, loader)",
        """
if run.is_main:
    run.kv.push("steps", torch.zeros((), dtype=torch.int64), "assign")
run.kv.barrier()
run.prepare(model, optimizer, loader)
""",
    ).replace(
        "optimizer.zero_grad()\n",
        """optimizer.zero_grad()
        if run.is_main:
            run.kv.wait(run.kv.push("steps", torch.ones((), dtype=torch.int64)))
        run.log(steps=run.step)
        while run.step >= 6 and not (run.dir / "go").exists():
            time.sleep(0.001)
version, steps = run.kv.pull("steps").result()
assert (version, int(steps)) == (run.step + 1, run.step), (version, steps, run.step)
""",
    )
)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_keys_beside_a_strategy_are_in_its_checkpoints(tmp_path: Path, strategy: str) -> None:
    """Every process is killed; the key has what it had at the checkpoint's step, and its version goes on from there."""
    flags = ["--slots", "2", "--strategy", strategy, "--servers", "2", "--checkpoint-every", "2"]
    doomed = Doomed(tmp_path, write_script(tmp_path, BESIDE), 2, flags)
    doomed.wait_for(lambda: any((doomed.folder / "checkpoints").glob("step-*/manifest.json")))
    doomed.kill()
    finish(doomed)  # type: ignore[arg-type]
    done = paceline("resume", "--runs", "runs", "it", "-n", "1", "--servers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr


MAINS_ALONE = HEAD + BODY.replace(
    "optimizer.zero_grad()\n",
    """optimizer.zero_grad()
        if run.is_main and run.step == 1:
            run.kv.wait(run.kv.push("mark", torch.full((3,), 7.0), "assign"))
        if run.is_main and run.step == 3 and run.rank == run._session.worker == 0:
            import os
            os.kill(os.getpid(), 9)
""",
)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_keys_that_a_lost_main_alone_has_used_are_in_later_checkpoints(tmp_path: Path, strategy: str) -> None:
    """Whoever is main then has never called `run.kv`; the servers know of them."""
    flags = ["--slots", "2", "--strategy", strategy, "--servers", "2", "--checkpoint-every", "5"]
    result = launch(tmp_path, MAINS_ALONE, "-n", "2", *flags, name="it")
    assert result.code == 0 and result.summary["recoveries"] == 1, result.err
    (found,) = listed(str(tmp_path / "runs" / "it" / "checkpoints"))
    version, values = Snapshot.read(found.read()).tree["keys"]["mark"]
    assert found.step > 3 and version == 1 and values.tolist() == [7.0, 7.0, 7.0]


def test_keys_and_parameters_both_survive_each_server(tmp_path: Path) -> None:
    """They are at the same servers, in rooms of one layout."""
    with going(tmp_path, BESIDE, "-n", "2", "--slots", "2", "--strategy", "ps", "--servers", "2") as run:
        run.wait_for_step(6)
        for server in range(2):
            os.kill(pid_of(run, server), signal.SIGKILL)
            run.wait_for(settled(run, server), f"a layout without server {server}")
        finish(run)
        result = ended(run)
    assert result.code == 0, result.err
    plain = launch(tmp_path, HEAD + BODY, "-n", "1", "--slots", "2", name="plain")
    assert result.weights == plain.weights


LENET = Path(__file__).resolve().parents[2] / "examples" / "kv_lenet.py"


def test_lenet_learns_by_push_and_pull(tmp_path: Path) -> None:
    """On a tenth of the data."""
    sizes = ("--samples", "6000", "--epochs", "3", "--batch-size", "32", "--sync-every", "2")
    result = launch(tmp_path, LENET, "-n", "2", "--servers", "2", args=sizes)
    assert result.code == 0, result.err
    assert result.out.count("test accuracy") == 3 and result.summary["metrics"]["accuracy"] > 0.6, result.out
