"""Parameter servers as processes: the same bits as all-reduce, whoever is killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cluster.fleet import Fleet
from paceline.cluster.journal import Journal
from paceline.cluster.store import LocalStore
from paceline.state import ledger
from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import (
    BODY,
    HEAD,
    Going,
    Result,
    ended,
    going,
    launch,
    paceline,
    write_script,
)
from tests.end_to_end.test_failures import left_processes
from tests.end_to_end.test_same_bits import flattened

SLOTS = ("--slots", "6")
PS = ("--strategy", "ps", *SLOTS)
STEPS = 24

SCRIPT = """
import hashlib, json, sys, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline

epochs, hold = int(sys.argv[1]), int(sys.argv[2])   # from step `hold` on it waits for a file named go
run = paceline.init(seed=5)

class Tied(nn.Module):
    '''Shared, frozen and unused parameters, buffers, draws.'''
    def __init__(self):
        super().__init__()
        self.inside, self.norm = nn.Linear(13, 13), nn.BatchNorm1d(13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(70))
        self.rare = nn.Parameter(torch.zeros(13))
        self.out = nn.Linear(13, 4)
    def forward(self, x, rare):
        x = F.dropout(F.relu(self.norm(self.inside(x))), 0.2, self.training)
        x = F.tanh(self.inside(self.frozen(x)))
        return self.out(x + self.rare if rare else x)

class Critic(nn.Module):
    '''In halves.'''
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 80).bfloat16(), nn.Linear(80, 1).bfloat16()
    def forward(self, x):
        return self.second(F.relu(self.first(x.bfloat16()))).float()

model, critic = Tied(), Critic()
optimizer = torch.optim.AdamW(
    [{"params": model.inside.parameters()}, {"params": [*model.norm.parameters(), model.rare], "weight_decay": 0.0},
     {"params": [model.unused, *model.frozen.parameters(), *model.out.parameters()], "lr": 0.02}], lr=0.01)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(92, 13, generator=g), torch.randint(0, 4, (92,), generator=g))
loader = DataLoader(data, batch_size=24, shuffle=True)
run.prepare(model, critic, optimizer, critic_optimizer, scheduler, loader)
steps = open(run.dir / "steps.txt", "a") if run.is_main else None

def digest():
    tensors = [*model.state_dict().values(), *critic.state_dict().values()]
    return hashlib.sha256(b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()

for epoch in run.epochs(epochs):
    for batch in loader:
        kind = run.step % 6
        for x, y in run.slots():
            F.cross_entropy(model(x, kind == 0), y).backward()
        if kind == 1:   # clipped
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if kind == 2:   # changed behind its back
            model.out.weight.grad.data.mul_(0.5)
            model.rare.grad = torch.ones(13)
        if kind == 3 and run.is_main:   # looked at, by one worker only
            float(model.inside.weight.grad.norm())
        if kind == 4:   # weights of the script's own making
            model.inside.weight.data.clamp_(-0.2, 0.2)
        if kind == 5:   # two reduce points for one step
            for x, y in run.slots():
                F.cross_entropy(model(x, False), y).backward()
        optimizer.step()
        if kind == 4:
            with torch.no_grad():
                model.out.bias.clamp_(max=0.01)
        critic.zero_grad()
        for x, y in run.slots():
            fake = model(x, False).detach() + 0.1 * torch.randn(len(x), 4)
            (critic(fake) - 1).square().mean().backward()
        critic_optimizer.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        optimizer.zero_grad(); critic_optimizer.zero_grad(set_to_none=kind != 3)
        scheduler.step()
        run.log(lr=scheduler.get_last_lr()[0])
        if run.is_main and steps is None:
            steps = open(run.dir / "steps.txt", "a")
        if run.is_main:
            steps.write(f"{run.step} {digest()}\\n"); steps.flush()
        while hold and run.step >= hold and not (run.dir / "go").exists() and not run._session.board.next_term:
            time.sleep(0.001)
"""


def steps(result: Result) -> dict[int, str]:
    """Main's weights behind every step: where two runs part tells what they do not agree on."""
    lines = (result.folder / "steps.txt").read_text().splitlines()
    return {int(step): digest for step, digest in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> dict[int, str]:
    """What all-reduce comes to, after every step of a long run."""
    result = alone(tmp_path_factory.mktemp("undisturbed"), SCRIPT, slots=int(SLOTS[1]), args=("10", "0"))
    assert result.code == 0, result.err
    return steps(result) | {-1: result.weights}


def check(result: Result, undisturbed: dict[int, str]) -> None:
    assert result.code == 0, f"{result.out}\n{result.err}"
    wrong = [(step, step % 6) for step, digest in steps(result).items() if undisturbed[step] != digest]
    assert not wrong, f"(step, kind) that differ from all-reduce: {wrong}"
    assert max(steps(result)) == result.summary["steps"] - 1 or max(steps(result)) == result.summary["steps"]


@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (3, 1), (3, 3)])
def test_the_bits_of_all_reduce(tmp_path: Path, workers: int, servers: int, undisturbed: dict[int, str]) -> None:
    result = launch(tmp_path, SCRIPT, *PS, "-n", str(workers), "--servers", str(servers), args=("6", "0"))
    check(result, undisturbed)
    assert result.summary["steps"] == STEPS and left_processes(str(tmp_path)) == []


def test_a_backward_of_the_script_s_own_behind_the_reduce_point(tmp_path: Path, alone: Alone) -> None:
    """A penalty on the weights, say: every worker adds the same to the whole batch's gradient."""
    script = HEAD + BODY.replace(
        "optimizer.step();", "(0.1 * model[0].weight.square().sum()).backward(); optimizer.step();"
    )
    want = alone(tmp_path, script, slots=2).weights
    result = launch(tmp_path, script, "-n", "2", "--slots", "2", "--strategy", "ps", name="ps")
    assert result.weights == want


def test_gradients_that_are_left_to_be_added_to_in_the_next_step(tmp_path: Path, alone: Alone) -> None:
    script = HEAD + BODY.replace(
        "optimizer.step(); optimizer.zero_grad()", "if run.step % 2: optimizer.step(); optimizer.zero_grad()"
    )
    want = alone(tmp_path, script, slots=4).weights
    for strategy in ("ps", "ps+backup:1"):
        done = launch(
            tmp_path, script, "-n", "2", "--slots", "4", "--strategy", strategy, name=strategy[:2] + strategy[-1:]
        )
        assert done.weights == want


def test_two_optimizers_behind_one_reduce_point(tmp_path: Path, alone: Alone) -> None:
    """A worker that lags finds the second one's step in the fragments already when it pulls the first one's."""
    head = HEAD.replace(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
        "optimizer = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)\n"
        "second = torch.optim.AdamW(model[2].parameters(), lr=0.01)",
    )
    body = BODY.replace("run.prepare(model, optimizer, loader)", "run.prepare(model, optimizer, second, loader)")
    body = body.replace(
        "optimizer.step();", "run._session.worker and time.sleep(0.02); optimizer.step(); second.step();"
    )
    script = "import time" + head + body.replace("optimizer.zero_grad()", "model.zero_grad()")
    want = alone(tmp_path, script, slots=2).weights
    result = launch(tmp_path, script, "-n", "2", "--slots", "2", "--strategy", "ps", "--servers", "2", name="ps")
    assert result.weights == want


def test_gradients_that_are_accumulated_over_steps(tmp_path: Path, alone: Alone) -> None:
    body = BODY.replace("optimizer.step();", "if run.step % 3 == 1: continue\n        optimizer.step();")
    want = alone(tmp_path, HEAD + body, slots=2).weights
    assert launch(tmp_path, HEAD + body, "-n", "2", "--slots", "2", "--strategy", "ps", name="ps").weights == want


def test_a_flat_loop(tmp_path: Path, alone: Alone) -> None:
    flat = HEAD + flattened(BODY)
    want = alone(tmp_path, HEAD + BODY, slots=2).weights
    assert launch(tmp_path, flat, "-n", "2", "--slots", "2", "--strategy", "ps", name="ps").weights == want


def test_plain_python(tmp_path: Path, alone: Alone) -> None:
    """init(strategy="ps") in a process of its own: its server is in it."""
    served, added = (alone(tmp_path, HEAD + BODY, slots=4, strategy=way, name=way) for way in ("ps", "allreduce"))
    assert served.summary["strategy"] == "ps" and served.weights == added.weights


def test_servers_that_the_script_asks_for_are_the_command_s_to_start(tmp_path: Path) -> None:
    script = (HEAD + BODY).replace("init()", "init(strategy='ps', servers=2)")
    result = launch(tmp_path, script, "-n", "2")
    assert result.code == 2 and "paceline run --strategy ps --servers 2" in result.last_line, result.err
    assert launch(tmp_path, script, "-n", "2", "--strategy", "ps", "--servers", "2", name="told").code == 0


def test_a_dry_run_needs_no_servers(tmp_path: Path) -> None:
    result = launch(tmp_path, HEAD + BODY, *held(2, 2), "--dry-run")
    assert result.code == 0, result.err
    assert "servers" in result.out and "ps" in result.out


# deaths


def fleet(run: Going) -> Fleet:
    """What the leader knows of the servers."""
    known = json.loads((run.folder / "agent.json").read_text())
    store = LocalStore(Path(known["store"]))
    try:
        return Journal.decode(store.read().state).fleet
    finally:
        store.close()


def settled(run: Going, server: int) -> Callable[[], bool]:
    """Whether everything that this one held is held by others, as often as it should be."""

    def it_is() -> bool:
        now = fleet(run)
        there = len(now.addresses) >= now.wanted and server not in now.addresses
        return there and now.placement is not None and now.placement.settled

    return it_is


def holds(run: Going, server: int) -> Callable[[], bool]:
    def it_does() -> bool:
        placement = fleet(run).placement
        return placement is not None and placement.holds(server)

    return it_does


def pid_of(run: Going, server: int) -> int:
    return int(run.wait_for(run.event("server started", server=server), f"server {server}")["pid"])


def finish(run: Going) -> Result:
    (run.folder / "go").touch()
    return ended(run)


def held(workers: int, servers: int, *flags: str) -> tuple[str, ...]:
    return (*PS, "-n", str(workers), "--servers", str(servers), *flags)


LONG = ("10", "26")


def test_each_server_in_turn(tmp_path: Path, seed: int, undisturbed: dict[int, str]) -> None:
    """None of those that the run began with is left at the end."""
    draw = random.Random(f"{seed} each")
    order, step = draw.sample(range(3), 3), draw.randrange(1, 25)
    print(f"servers {order} from step {step} on")
    with going(tmp_path, SCRIPT, *held(2, 3), args=LONG) as run:
        run.wait_for_step(step)
        for server in order:
            os.kill(pid_of(run, server), signal.SIGKILL)
            run.wait_for(settled(run, server), f"a layout without server {server}")
        result = finish(run)
    check(result, undisturbed)
    deaths = [event["server"] for event in result.events() if event["event"] == "server ended" and event["server"] < 3]
    assert deaths == order
    assert all(f"server {server} was killed by SIGKILL; its copies take over" in result.err for server in order)
    assert left_processes(str(tmp_path)) == []


def test_a_server_and_a_worker_at_once(tmp_path: Path, seed: int, undisturbed: dict[int, str]) -> None:
    draw = random.Random(f"{seed} both")
    step, server, worker = draw.randrange(1, 25), draw.randrange(2), draw.randrange(2)
    print(f"server {server} and worker {worker} from step {step} on")
    with going(tmp_path, SCRIPT, *held(2, 2), args=LONG) as run:
        first = pid_of(run, server)
        run.wait_for_step(step)
        os.kill(first, signal.SIGKILL)
        run.kill(worker)
        run.wait_for(settled(run, server), f"a layout without server {server}")
        run.wait_for(run.event("joined"), "a replacement")
        result = finish(run)
    check(result, undisturbed)


def test_a_server_and_the_coordinator_at_once(tmp_path: Path, seed: int, undisturbed: dict[int, str]) -> None:
    draw = random.Random(f"{seed} coordinator")
    step, server = draw.randrange(1, 25), draw.randrange(3)
    print(f"server {server} from step {step} on")
    with going(tmp_path, SCRIPT, *held(2, 3), args=LONG) as run:
        first, standby = pid_of(run, server), run.wait_for_standby()
        run.wait_for_step(step)
        leader = run.leader
        os.kill(first, signal.SIGKILL)
        os.kill(leader, signal.SIGKILL)
        run.wait_for(lambda: run.leader == standby, "the standby's lead")
        run.wait_for(settled(run, server), f"a layout without server {server}")
        result = finish(run)
    check(result, undisturbed)


# another number of servers


def test_servers_come_and_go_while_it_trains(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """From one to three, from three to one; whoever is there at the end was not there at the beginning."""
    with going(tmp_path, SCRIPT, *held(2, 1), args=("10", "38")) as run:
        run.wait_for_step(2)
        assert paceline("scale", "it", "--servers", "3", cwd=tmp_path).returncode == 0
        run.wait_for(lambda: len(fleet(run).addresses) == 3 and fleet(run).settled, "three servers")
        assert fleet(run).described()["copies"] == 2
        os.kill(pid_of(run, 0), signal.SIGKILL)
        run.wait_for(settled(run, 0), "a layout without server 0")
        done = paceline("scale", "it", "--servers", "1", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "it goes to 1 server\n")
        run.wait_for(lambda: len(fleet(run).addresses) == 1 and fleet(run).settled, "one server")
        result = finish(run)
    check(result, undisturbed)
    assert "going to 3 servers" in result.err and "the parameters are at 3 servers now, 2 copies of each" in result.err
    assert "goes: others hold all that it held" in result.err
    ends = {event["server"]: event["why"] for event in result.events() if event["event"] == "server ended"}
    assert sorted(ends.values()) == [
        "others hold all that it held",
        "others hold all that it held",
        "the run is over",
        "was killed by SIGKILL",
    ]
    shown = paceline("show", "it", cwd=tmp_path).stdout
    assert "4 servers, 1 of them lost; scaled to 1" in shown and "--servers 1 was asked for" in shown
    assert left_processes(str(tmp_path)) == []


def test_a_number_of_servers_that_cannot_be(tmp_path: Path) -> None:
    with going(tmp_path, SCRIPT, *held(1, 1), args=LONG) as run:
        run.wait_for_step(2)
        for flags, why in (
            (("--servers", "0"), "somebody must hold the parameters"),
            (("--servers", "900"), "may start 100 more"),
            (("-n", "7", "--servers", "2"), "7 workers for 6 slots"),
            ((), "--servers"),
        ):
            refused = paceline("scale", "it", *flags, cwd=tmp_path)
            assert refused.returncode == 2 and why in refused.stderr, refused.stderr
        assert len(fleet(run).addresses) == 1
        finish(run)


# no copy left


def receipts(run: Path) -> dict[int, tuple[int, ...]]:
    return {int(row[0]): tuple(map(int, row)) for row in ledger.read(run / "receipts").table()}


@pytest.mark.parametrize(
    ("servers", "flags", "lost"),
    [(2, (), (0, 1)), (2, ("--replicas", "1"), (1,)), (1, ("--checkpoint-every", "0"), (0,))],
    ids=["both copies", "one copy", "no checkpoint"],
)
def test_nobody_has_a_copy_any_more(
    tmp_path: Path, servers: int, flags: tuple[str, ...], lost: tuple[int, ...], seed: int, undisturbed: dict[int, str]
) -> None:
    """All go back together; the steps that were trained twice are told, and their receipts count once."""
    # Some steps behind a checkpoint, so that several are trained again.
    step = random.Random(f"{seed} {lost}").choice([step for step in range(9, 25) if step % 7 > 2])
    print(f"servers {lost} from step {step} on")
    with going(tmp_path, SCRIPT, *held(2, servers, "--checkpoint-every", "7", *flags), args=LONG) as run:
        pids = [pid_of(run, server) for server in lost]
        run.wait_for_step(step)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        told = run.wait_for(run.event("rolled back"), "a rollback")
        result = finish(run)
    check(result, undisturbed)
    assert result.summary["weights_sha256"] == undisturbed[-1]
    first, count = told["step"], told["redone"]  # none is at the end of an epoch, of 4 steps
    assert first in (0, 7, 14, 21, 29, 35, 42, 49, 57) and (first == 0) == ("--checkpoint-every" in flags)
    assert result.summary["rollbacks"] == 1 and result.summary["steps_redone"] == count >= step - first
    assert f"steps {first}-{first + count - 1} are trained again" in result.err
    assert sorted(receipts(result.folder)) == list(range(40))
    verified = paceline("verify", "it", cwd=tmp_path)
    assert verified.returncode == 0 and "exactly once" in verified.stdout, verified.stdout
    shown = paceline("show", "it", cwd=tmp_path).stdout
    assert "back to a checkpoint 1 time" in shown and f"{count} steps trained again" in shown
    assert left_processes(str(tmp_path)) == []


def test_the_coordinator_dies_while_the_run_goes_back(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    with going(tmp_path, SCRIPT, *held(2, 1, "--checkpoint-every", "7"), args=LONG) as run:
        server, standby = pid_of(run, 0), run.wait_for_standby()
        run.wait_for_step(8)
        leader = run.leader
        os.kill(server, signal.SIGKILL)
        run.wait_for(run.event("rolling back"), "a rollback")
        os.kill(leader, signal.SIGKILL)
        run.wait_for(lambda: run.leader == standby, "the standby's lead")
        run.wait_for(run.event("rolled back"), "the way back")
        result = finish(run)
    check(result, undisturbed)
    assert result.summary["weights_sha256"] == undisturbed[-1] and left_processes(str(tmp_path)) == []


def test_a_run_that_never_comes_to_a_step_goes_back_no_more(tmp_path: Path) -> None:
    """Whatever takes the servers takes them again."""
    script = SCRIPT.replace(
        "for batch in loader:", "for batch in loader:\n        while run.resumed: time.sleep(0.001)", 1
    )
    with going(tmp_path, script, *held(2, 1, "--checkpoint-every", "8"), args=("10", "10")) as run:
        run.wait_for((run.folder / "checkpoints" / "step-00000009" / "manifest.json").exists, "a checkpoint")
        for server in range(5):
            pid = pid_of(run, server)
            run.wait_for(holds(run, server), f"a layout with server {server}")
            os.kill(pid, signal.SIGKILL)
        result = ended(run)
    assert result.code == 1 and "after going back 3 times without a step trained in between" in result.last_line
    assert "`paceline resume it` goes on from the newest checkpoint" in result.last_line
    assert result.summary["rollbacks"] == 4 and left_processes(str(tmp_path)) == []


# ends


HOWS = {
    "exits": ("sys.exit(3)", 3, "worker 1: the script called sys.exit(3)"),
    "raises": ("raise RuntimeError('boom')", 1, "RuntimeError: boom (worker "),
}


@pytest.mark.parametrize("how", HOWS)
def test_a_script_that_fails_ends_the_run(tmp_path: Path, how: str) -> None:
    words, code, cause = HOWS[how]
    who = "run._session.worker == 1" if how == "exits" else "True"
    body = BODY.replace(
        "for x, y in run.slots():", f"if run.step == 3 and {who}: {words}\n        for x, y in run.slots():"
    )
    result = launch(tmp_path, HEAD + "import sys\n" + body, *held(2, 2))
    assert result.code == code and cause in result.last_line, result.err
    assert left_processes(str(tmp_path)) == []


def test_a_checkpoint_is_resumed_with_other_workers_and_servers(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Everything was killed, servers too; so the state of their optimizers is the checkpoint's."""
    script = write_script(tmp_path, SCRIPT.replace("sys.argv[1]", "'10'").replace("sys.argv[2]", "'36'"))
    doomed = Doomed(tmp_path, script, 2, [*PS, "--servers", "2", "--checkpoint-every", "7"])
    doomed.wait_for((doomed.folder / "checkpoints" / "step-00000029" / "manifest.json").exists)
    doomed.kill()
    (doomed.folder / "go").touch()
    done = paceline("resume", "--runs", "runs", "it", "-n", "3", "--servers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((doomed.folder / "summary.json").read_text())
    assert summary["weights_sha256"] == undisturbed[-1]
    wrong = [(k, k % 6) for k, digest in steps(Result(0, "", "", doomed.folder)).items() if undisturbed[k] != digest]
    assert not wrong
