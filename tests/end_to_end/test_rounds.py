"""Replicas that train apart: the same weights whoever is killed, in any phase of a round, and what they are equal to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.tensors import codecs
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import Result, ended, launch, paceline, write_script
from tests.end_to_end.machines import spread

SCRIPT = """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
orders = sys.argv[1:]
model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(294, 13, generator=g), torch.randint(0, 4, (294,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
run.prepare(model, optimizer, scheduler, loader)

def doomed(owner, name, after=False):
    plain = getattr(owner, name)
    def called(*args):
        order = f"{run._session.worker}:{run._strategy.rounds}:{name}"
        if order in orders and not after:
            os.kill(os.getpid(), 9)
        result = plain(*args)
        if order in orders:
            os.kill(os.getpid(), 9)
        return result
    setattr(owner, name, called)

for epoch in run.epochs(3):
    loop = run._feeding.loop
    if orders and (epoch == 0 or run.resumed):
        doomed(loop._exchanges, "_said"), doomed(loop, "_keep"), doomed(run._stepper, "delivered")
        doomed(run._strategy, "exchange", after=True), doomed(run._strategy, "take")
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
run.save(model.state_dict(), "weights.pt")
"""

MOMENTS = ("_said", "exchange", "take", "_keep", "delivered")


def trained(
    folder: Path, strategy: str, *flags: str, orders: tuple[str, ...] = (), script: str = SCRIPT, workers: int = 3
) -> Result:
    folder.mkdir()
    done = launch(folder, script, "-n", str(workers), "--strategy", strategy, *flags, args=orders)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.summary["samples"] == 3 * next(count for count in (288, 290, 294) if str(count) in script)
    proven = paceline("verify", "it", cwd=folder)
    assert proven.returncode == 0, proven.stdout
    return done


BACK_IN_TIME = ("--on-death", "drop", "--drop-after", "60")


@pytest.mark.parametrize(
    ("strategy", "flags"), [("diloco:4+int8", ()), ("streaming:8,2,overlap=2", BACK_IN_TIME), ("gossip:4", ())]
)
def test_replicas_are_killed_in_every_phase_of_a_round_and_the_weights_are_the_same(
    tmp_path: Path, strategy: str, flags: tuple[str, ...]
) -> None:
    clean = trained(tmp_path / "clean", strategy)
    # Worker 0 is main; who stands for a lost one is numbered on. In `_keep` it has taken part, and left no trace of it.
    orders = tuple(f"{worker}:{1 + worker}:{moment}" for worker, moment in enumerate(MOMENTS))
    fault = ("--fault", "kill coordinator @step 20")
    killed = trained(tmp_path / "killed", strategy, *flags, *fault, orders=orders)
    assert killed.summary["recoveries"] == len(MOMENTS)
    assert killed.summary["weights_sha256"] == clean.summary["weights_sha256"]
    assert killed.summary["rounds"] == clean.summary["rounds"]
    assert "dropped" not in killed.summary


AVERAGED = (
    SCRIPT.replace(
        "run.prepare(",
        """from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run.register("ema", ema)
run.prepare(""",
    )
    .replace("optimizer.step()\n", "optimizer.step(); ema.update_parameters(model)\n")
    .replace(
        "run.save(",
        """from paceline.state.hash import weights_sha256
(run.dir / f"ema-{run._session.worker}").write_text(weights_sha256(ema.state_dict()))
run.save(""",
    )
)


@pytest.mark.parametrize("strategy", ["local:13", "diloco:4+int8", "streaming:8,2,overlap=2", "gossip:4"])
def test_an_average_of_the_weights_is_one_behind_the_loop_whoever_is_killed(tmp_path: Path, strategy: str) -> None:
    """Each replica has moved its own; whoever is main at the end, what it saves is the same."""
    clean = trained(tmp_path / "clean", strategy, script=AVERAGED)
    last = clean.summary["rounds"] - 1
    orders = ("0:1:take", f"1:{last}:exchange", f"2:{last}:take")
    killed = trained(tmp_path / "killed", strategy, orders=orders, script=AVERAGED)
    assert killed.summary["recoveries"] == 3 and killed.summary["rounds"] == clean.summary["rounds"]
    found = [path.read_text() for done in (clean, killed) for path in done.folder.glob("ema-*")]
    assert len(found) > 3 and len(set(found)) == 1, "one that is killed in the last exchange need not come back"
    plain = trained(tmp_path / "plain", strategy)
    assert clean.summary["weights_sha256"] == killed.summary["weights_sha256"] == plain.summary["weights_sha256"]


STOPPED = AVERAGED.replace(
    "optimizer.step(); ",
    """if run.step == 15 and orders == ["stop"] and not run.resumed:
            run.stop("enough")
        optimizer.step(); """,
)


@pytest.mark.parametrize(
    "strategy", ["local:5+randomk:0.1", "diloco:4+randomk:0.1", "streaming:8,2,overlap=2+int8", "gossip:4"]
)
def test_a_run_that_stops_in_an_epoch_goes_on_as_if_it_had_not(tmp_path: Path, strategy: str) -> None:
    """What replicas exchange at the stop, so that the script can save one model, is not in the checkpoint it goes on from."""
    clean = trained(tmp_path / "clean", strategy, "--checkpoint-every", "1000", script=STOPPED)
    flags = ("-n", "3", "--strategy", strategy, "--checkpoint-every", "1000")
    stopped = launch(tmp_path, STOPPED, *flags, args=("stop",), name="it")
    assert stopped.summary["exit"] == "enough", stopped.err
    assert 0 < stopped.summary["steps"] < clean.summary["steps"] and stopped.summary["steps"] % 13
    done = paceline("resume", "--runs", "runs", "it", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = json.loads((stopped.folder / "summary.json").read_text())
    assert again["weights_sha256"] == clean.summary["weights_sha256"]
    found = [path.read_text() for folder in (clean.folder, stopped.folder) for path in folder.glob("ema-*")]
    assert len(found) > 3 and len(set(found)) == 1


ODD = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
model = nn.Linear(13, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(294, 13, generator=g), torch.randint(0, 4, (294,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("most", torch.full((3,), torch.iinfo(torch.int64).max))
        self.register_buffer("constant", torch.randn(1000, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("average", torch.zeros(4, 13))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.frozen = nn.Linear(13, 4)
        self.model = model
odd = Odd()
with torch.no_grad():
    odd.frozen.weight.fill_(run._session.worker)
began = {name: buffer.clone() for name, buffer in odd.named_buffers()}
REGISTER
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        odd.average = 0.9 * odd.average + 0.1 * model.weight.detach()  # a new tensor each time
        odd.count += 1
    for name in ("least", "most", "constant", "mask"):
        assert torch.equal(getattr(odd, name), began[name]), name
    assert odd.count == 13 * (epoch + 1) and not odd.frozen.weight.any(), (odd.count, odd.frozen.weight)
(run.dir / f"average-{run._session.worker}").write_text(str(odd.average.double().sum().item()))
"""


@pytest.mark.parametrize("strategy", ["diloco:4", "gossip:4", "streaming:8,2"])
def test_what_nobody_has_changed_stays_as_it_is_and_what_somebody_has_is_one(tmp_path: Path, strategy: str) -> None:
    """Values that no mean can hold, other memory each time, and another beginning on each worker: main's counts."""
    flags = ("-n", "2", "--strategy", strategy)
    done = launch(tmp_path, ODD.replace("REGISTER", 'run.register("odd", odd)'), *flags)
    assert done.code == 0, done.err
    first, second = ((done.folder / f"average-{worker}").read_text() for worker in range(2))
    assert first == second
    alone = ODD.replace("REGISTER", 'if run.is_main: run.register("odd", odd)')
    refused = launch(tmp_path, alone, *flags, name="alone")
    assert refused.code == 2 and "not under `if run.is_main:`" in refused.err


EARLY = SCRIPT.replace(
    "for epoch in run.epochs(3):",
    """if run._session.worker == 0 and orders:
    os.kill(os.getpid(), 9)
while run._session.worker >= 3 and run._session.board.see(1).step < 1:
    time.sleep(0.001)
for epoch in run.epochs(3):""",
).replace("import os, sys", "import os, sys, time")


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [("local:4", ()), ("diloco:4+int8", BACK_IN_TIME), ("streaming:8,2,overlap=2", ()), ("gossip:4", ())],
)
def test_one_that_is_killed_before_it_has_left_any_state_begins_as_the_others_did(
    tmp_path: Path, strategy: str, flags: tuple[str, ...]
) -> None:
    """They have left theirs by then, and hold them: what its replacement takes is what is empty."""
    clean = trained(tmp_path / "clean", strategy, script=EARLY)
    killed = trained(tmp_path / "killed", strategy, *flags, orders=("early",), script=EARLY)
    assert killed.summary["recoveries"] == 1 and "dropped" not in killed.summary
    assert killed.summary["weights_sha256"] == clean.summary["weights_sha256"]


BESIDE = (
    SCRIPT.replace("import os, sys", "import os, sys, threading")
    .replace(
        """        doomed(run._strategy, "exchange", after=True), doomed(run._strategy, "take")
""",
        """        doomed(loop._exchanges, "start", after=True), doomed(run._strategy, "exchange", after=True)
        for fragment in run._strategy._fragments:
            doomed(fragment.reducer, "open"), doomed(fragment.reducer, "commit"), doomed(fragment.reducer, "_met")
""",
    )
    .replace(
        """        order = f""",
        """        if name in ("open", "commit", "_met", "exchange") and threading.current_thread().name != "paceline-exchange":
            return plain(*args)
        order = f""",
    )
)
"""Killed while the exchange goes on beside the training, in its thread; or in the script's, once that has begun."""


def test_replicas_are_killed_while_an_exchange_goes_on_beside_their_training(tmp_path: Path) -> None:
    strategy = "streaming:8,2,overlap=3+int8"
    clean = trained(tmp_path / "clean", strategy)
    # Before it has brought anything, with its part there, when it has all the messages, and with the result, which others take.
    moments = ("open", "commit", "_met", "exchange", "start")
    orders = tuple(f"{worker}:{1 + worker}:{moment}" for worker, moment in enumerate(moments))
    killed = trained(tmp_path / "killed", strategy, orders=orders, script=BESIDE)
    assert killed.summary["recoveries"] == len(moments)
    assert killed.summary["weights_sha256"] == clean.summary["weights_sha256"]
    assert killed.summary["rounds"] == clean.summary["rounds"]


UNTIL_RETURNED = (
    SCRIPT.replace("run.epochs(3)", "run.epochs(2000)")
    .replace("294", "300")
    .replace(
        "    scheduler.step()\n",
        "    scheduler.step()\n"
        "    told = (run.dir / 'events.jsonl').read_text()\n"
        # The first may be back before the second is lost.
        "    if 'returned' in told and 'replica 2 lost, and not' in told: run.stop('one is back')\n",
    )
)


def test_lost_replicas_are_dropped_the_others_train_their_shares_and_new_ones_come_in(tmp_path: Path) -> None:
    # The first is lost in the middle of a round, the second behind an exchange, before it has left its state.
    orders = ("1:2:delivered", "2:5:exchange")
    flags = ("-n", "4", "--strategy", "diloco:4+int8", "--on-death", "drop", "--drop-after", "0")
    done = launch(tmp_path, UNTIL_RETURNED, *flags, args=orders)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.summary["samples"] == done.summary["epochs"] * 300
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0 and "exactly once" in proven.stdout, proven.stdout
    dropped = {lost["replica"]: lost["step"] for lost in done.summary["dropped"]}
    assert set(dropped) == {1, 2}
    told = {event["event"]: event["why"] for event in done.events()}
    assert "replica 2 lost, and not back in time: the run goes on with replicas 0" in told["dropped"]
    assert "in the run again" in told["returned"]
    assert "2 replicas dropped" in paceline("show", "it", cwd=tmp_path).stdout


BY_BATCH = (
    SCRIPT.replace("StepLR(optimizer, 1, 0.9)", "OneCycleLR(optimizer, 0.05, total_steps=40)")
    .replace("loader = DataLoader", "bodies = 0\nloader = DataLoader")
    .replace(
        "        optimizer.step()\n    scheduler.step()", "        optimizer.step(); scheduler.step(); bodies += 1"
    )
    + "if run.is_main:\n    assert scheduler.last_epoch == run.step == 39 < bodies, (scheduler.last_epoch, bodies)\n"
)


def test_a_schedule_by_batches_counts_the_steps_of_the_run_whoever_is_dropped(tmp_path: Path) -> None:
    """Not the shares of a lost replica, for which the loop's body runs once more in such a step."""
    flags = ("-n", "3", "--strategy", "diloco:4", "--on-death", "drop", "--drop-after", "0")
    done = launch(tmp_path, BY_BATCH, *flags, args=("2:2:delivered",))
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert [lost["replica"] for lost in done.summary["dropped"]] == [2]


def test_a_run_that_would_be_left_alone_waits_and_says_for_whom(tmp_path: Path) -> None:
    flags = ("-n", "2", "--strategy", "local:4", "--on-death", "drop", "--drop-after", "0")
    done = launch(tmp_path, SCRIPT, *flags, args=("1:1:delivered",))
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "dropped" not in done.summary and done.summary["samples"] == 3 * 294
    waiting = [event["why"] for event in done.events() if event["event"] == "waiting"]
    assert waiting == ["replica 1 lost: the run goes on with 2 replicas at least, and waits for another worker"]


def test_the_far_machines_replica_is_killed_and_the_weights_are_those_of_one_machine(tmp_path: Path) -> None:
    clean = trained(tmp_path / "clean", "diloco:4+int8", "-n", "2")
    folder = tmp_path / "spread"
    folder.mkdir()
    orders = ("1:2:exchange", "2:3:_keep", "3:5:delivered")
    script = SCRIPT.replace("sys.argv[1:]", repr(orders))
    with spread(folder, script, 2, "-n", "2", "--strategy", "diloco:4+int8") as run:
        killed = ended(run)
        assert run.agents[0].wait(20) == 0
    assert killed.weights == clean.weights
    homes = {event["worker"]: event["machine"] for event in killed.events() if event["event"] == "worker started"}
    assert homes == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    assert killed.summary["participants"] == clean.summary["participants"] == {"2": clean.summary["rounds"]}
    assert killed.summary["drift"]["most"] == pytest.approx(clean.summary["drift"]["most"], rel=0.1)
    message = codecs.parse("int8").nbytes([(16, 13), (16,), (4, 16), (4,)])
    assert killed.summary["wire_bytes"] > 2 * killed.summary["rounds"] * message
    assert clean.summary["copied_bytes"] == 0
    moments = (
        2 * 4 * (16 * 13 + 16 + 2 * 16 + 4 * 16 + 4)
    )  # of AdamW; main's, which is not killed, and whose last one may be on its way
    assert killed.summary["copied_bytes"] > (killed.summary["rounds"] - 1) * moments
    assert "; copies of states " in killed.err
    proven = paceline("verify", "it", cwd=folder)
    assert proven.returncode == 0, proven.stdout


def weights(done: Result) -> torch.Tensor:
    state = torch.load(done.folder.parents[1] / "weights.pt")
    return torch.cat([value.flatten().double() for value in state.values()])


def test_an_average_after_each_step_is_all_reduce_for_sgd_and_diloco_with_plain_values(tmp_path: Path) -> None:
    script = SCRIPT.replace("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.05)")
    script = script.replace("nn.BatchNorm1d(16), ", "")  # whose statistics of a share are not those of the batch
    script = script.replace("294", "290")  # the last batch has 2 samples, for 3 replicas
    reduced = weights(trained(tmp_path / "allreduce", "allreduce", "--slots", "3", script=script))
    averaged = trained(tmp_path / "local", "local:1", script=script)
    assert float((weights(averaged) - reduced).norm() / reduced.norm()) <= 1e-6
    plain = trained(tmp_path / "diloco", "diloco:1,lr=1,momentum=0", script=script)
    assert float((weights(averaged) - weights(plain)).norm() / reduced.norm()) <= 1e-6


def test_two_that_gossip_take_the_mean_of_all_who_are_there(tmp_path: Path) -> None:
    # Not with Adam, which makes a step of a bias before BatchNorm out of its gradient's rounding.
    script = SCRIPT.replace("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.05, momentum=0.9)")
    script = script.replace("294", "288")  # shares of the same size: local counts by samples
    averaged = weights(trained(tmp_path / "local", "local:3", script=script, workers=2))
    gossiped = weights(trained(tmp_path / "gossip", "gossip:3", script=script, workers=2))
    assert float((averaged - gossiped).norm() / averaged.norm()) <= 1e-6


def test_all_processes_are_killed_and_every_replica_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    clean = trained(tmp_path / "clean", "streaming:6,3")
    folder = tmp_path / "killed"
    folder.mkdir()
    script = write_script(folder, SCRIPT)
    flags = ("--strategy", "streaming:6,3", "--checkpoint-every", "5", "--fault", "slow worker:1 x3")
    doomed = Doomed(folder, script, 3, flags)
    doomed.wait_for(lambda: len(list((doomed.folder / "checkpoints").glob("step-*/manifest.json"))) >= 2)
    doomed.kill()
    refused = paceline("resume", "it", "-n", "2", cwd=folder)
    assert refused.returncode == 2 and "each worker trains a replica of its own" in refused.stderr
    again = paceline("resume", "it", cwd=folder)
    assert again.returncode == 0, again.stderr
    summary = json.loads((doomed.folder / "summary.json").read_text())
    assert summary["weights_sha256"] == clean.summary["weights_sha256"]
