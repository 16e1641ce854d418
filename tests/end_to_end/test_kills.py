"""Workers are killed while a run trains: the others carry on, a new one joins, and the result is the same bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.alone import Alone
from tests.end_to_end.killing import DYING
from tests.end_to_end.launching import HEAD, Result, ended, going, launch
from tests.end_to_end.test_failures import left_processes

EPOCHS, STEPS, SAMPLES = 8, 32, 8 * 168
SLOTS = ("--slots", "12")

SCRIPT = (
    """
import hashlib, json, os, sys, time
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import paceline

size, loaders, *orders = sys.argv[1:]   # orders: WORKER:STEP:MOMENT dies there; hold:STEP:TERM waits for a newcomer
#                                       until one is announced or has come, which makes it term TERM
run = paceline.init(seed=5)
"""
    + DYING
    + """
class Noisy(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(168, 13, generator=g), torch.randint(0, 4, (168,), generator=g)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, k):
        return self.x[k] + 0.1 * torch.randn(13), self.y[k]

width = 300 if size == "large" else 16   # "plain" is small with one reduce point a step
model = nn.Sequential(nn.Linear(13, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width),
                      nn.Tanh(), nn.Linear(width, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
loader = DataLoader(Noisy(), batch_size=48, shuffle=True, num_workers=int(loaders))
held_out = DataLoader(TensorDataset(torch.randn(40, 13, generator=torch.Generator().manual_seed(8))), batch_size=7)
run.prepare(model, critic, optimizer, critic_optimizer, scheduler, loader)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run.register("ema", ema)

def score(batch):
    at("evaluate")
    return {"sum": model(batch[0]).sigmoid().sum(), "count": len(batch[0])}

for epoch in run.epochs(8):
    for batch in loader:
        at("batch")
        if f"{run._session.worker}:{run.step}:total" in orders:
            dies_inside("total")
        if f"{run._session.worker}:{run.step}:open" in orders:
            dies_inside("open")
        for order in orders:
            if order.startswith(f"hold:{run.step}:"):
                while not run._session.board.next_term and run._session.view.term < int(order.split(":")[2]):
                    time.sleep(0.001)
        shares = 0
        for x, y in run.slots():
            shares += 1
            if shares == 2:
                at("second share")
            seen = run.state.get("steps", 0)
            loss = F.cross_entropy(model(x), y) * (1 + 0.01 * (seen % 5)) + run.state.get("score", 0.0) * 1e-3 * model(x).mean()
            loss.backward()
            at("backward")
        at("reduced")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        at("optimizer")
        optimizer.step(); optimizer.zero_grad(); critic.zero_grad()
        if size == "small":
            for x, y in run.slots():
                at("second loop")
                (critic(model(x).detach() + 0.1 * torch.randn(len(x), 4)) - 1).square().mean().backward()
            critic_optimizer.step(); critic_optimizer.zero_grad()
        scheduler.step()
        ema.update_parameters(model)
        run.state["steps"] = seen + 1
        run.log(loss=loss)
        at("end")
    sums = run.evaluate(score, held_out)
    run.state["score"] = sums["sum"] / sums["count"]
    run.state.setdefault("scores", []).append(run.state["score"])
    at("epoch")
    if epoch % 4 == 3:
        with torch.no_grad():
            for mine, mean in zip(model.parameters(), ema.module.parameters()):
                mine.lerp_(mean, 0.1)
if run.is_main:
    said = hashlib.sha256(b"".join(t.numpy().tobytes() for t in ema.state_dict().values())).hexdigest()
    learned = {"ema": said, "state": run.state, "lr": scheduler.get_last_lr()}
    (run.dir / "learned.json").write_text(json.dumps(learned))
at("finish")
"""
)


def learned(result: Result) -> dict[str, Any]:
    assert result.code == 0, f"exit code {result.code}\n{result.out}\n{result.err}"
    return {"weights": result.weights, **json.loads((result.folder / "learned.json").read_text())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Callable[[str], dict[str, Any]]:
    """What one worker learns, by size of the model; trained once."""
    known: dict[str, dict[str, Any]] = {}

    def of(size: str) -> dict[str, Any]:
        if size not in known:
            result = alone(tmp_path_factory.mktemp(size), SCRIPT, slots=12, args=(size, "0"))
            assert (result.summary["steps"], result.summary["samples"]) == (STEPS, SAMPLES), result.err
            known[size] = learned(result)
        return known[size]

    return of


def check(result: Result, want: dict[str, Any], folder: Path, deaths: int) -> None:
    """The same training as undisturbed, nobody counted twice, nothing left."""
    assert learned(result) == want, result.err
    assert (result.summary["steps"], result.summary["samples"]) == (STEPS, SAMPLES)
    assert result.summary["exit"] == "finished"
    killed = [e for e in result.events() if e["event"] == "worker ended" and e["exit_code"] in (-9, -15)]
    assert len(killed) >= deaths, result.events()
    assert left_processes(str(folder)) == []
    for worker in {event["worker"] for event in result.events() if event["event"] == "worker started"}:
        assert "Traceback" not in (result.folder / "logs" / f"worker-{worker}.log").read_text()


Undisturbed = Callable[[str], dict[str, Any]]

# killed from outside


@pytest.mark.parametrize("size", ["small", "large"])
def test_one_worker_at_any_step(tmp_path: Path, seed: int, size: str, undisturbed: Undisturbed) -> None:
    """An ordinary worker, or main; the replacement takes part in the last steps."""
    draw = random.Random(f"{seed}{size}")
    step, victim = draw.randrange(STEPS - 8), draw.choice([1, 2]) if size == "small" else 0
    print(f"worker {victim} from step {step} on")
    with going(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=(size, "0", f"hold:{STEPS - 6}:3")) as run:
        run.wait_for_step(step)
        run.kill(victim)
        result = ended(run)
    check(result, undisturbed(size), tmp_path, 1)
    assert [event["worker"] for event in result.events() if event["event"] == "joined"] == [3]
    assert f"worker {victim} was killed by SIGKILL; going on with 2 workers" in result.err


def test_two_workers_at_once(tmp_path: Path, seed: int, undisturbed: Undisturbed) -> None:
    draw = random.Random(f"{seed} two")
    step, victims = draw.randrange(STEPS - 8), draw.sample(range(3), 2)
    print(f"workers {victims} from step {step} on")
    with going(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("small", "0", f"hold:{STEPS - 6}:4")) as run:
        run.wait_for_step(step)
        run.kill(*victims)
        result = ended(run)
    check(result, undisturbed("small"), tmp_path, 2)


def test_a_replacement_that_is_killed_while_it_starts(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Another one is started in its place, and joins."""
    with going(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("large", "0", f"hold:{STEPS - 6}:3")) as run:
        run.wait_for_step(5)
        run.kill(1)
        run.kill(3)
        result = ended(run)
    check(result, undisturbed("large"), tmp_path, 2)
    assert [event["worker"] for event in result.events() if event["event"] == "joined"] == [4]


# killed at an exact moment

MOMENTS = {
    "in the first step's second share; main in evaluate": ["1:0:second share", "0:8:evaluate"],
    "before the first share; behind the last backward of main": ["2:0:batch", "0:7:backward"],
    "between the reduce and the optimizer": ["1:9:reduced", "2:9:optimizer"],
    "after all have met; main too": ["1:6:total", "0:10:total"],
    "at the opening of a point; in evaluate": ["2:6:open", "1:8:evaluate"],
    "between two epochs; in a second reduce point": ["2:8:epoch", "0:11:second loop"],
    "at a step's start, and another in the retry": ["2:13:batch", "1:13:backward"],
    "in the last step; at the end of the script": ["1:31:second share", "2:32:finish"],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_at_these_moments(tmp_path: Path, moment: str, undisturbed: Undisturbed) -> None:
    orders = MOMENTS[moment]
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("small", "0", *orders))
    check(result, undisturbed("small"), tmp_path, len(orders))


@pytest.mark.parametrize("orders", [("1:6:total", "0:8:evaluate"), ("2:0:backward", "0:6:second share")])
def test_at_these_moments_with_large_gradients(
    tmp_path: Path, orders: tuple[str, ...], undisturbed: Undisturbed
) -> None:
    """Over 256 KiB the workers add up chunks for each other, and meet once more."""
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("large", "0", *orders))
    check(result, undisturbed("large"), tmp_path, len(orders))


def test_replacements_carry_on_alone(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Each newcomer joins, then an original dies, until none of them is left."""
    orders = ["1:3:backward", "hold:6:3", "0:9:second share", "hold:11:5", "2:14:optimizer", "hold:19:7"]
    orders += ["3:24:evaluate"]
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("small", "0", *orders))
    check(result, undisturbed("small"), tmp_path, 4)
    joined = [event["worker"] for event in result.events() if event["event"] == "joined"]
    assert joined[:3] == [3, 4, 5]


def test_joining_at_the_end_of_an_epoch_and_of_the_run(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Steps 7 and 31 are the last ones of their epochs: who comes there is let in behind step 8, and behind the last one never."""
    orders = ["1:5:batch", "hold:7:3", "2:31:batch", "hold:31:5"]
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("small", "0", *orders))
    check(result, undisturbed("small"), tmp_path, 2)
    assert [event["worker"] for event in result.events() if event["event"] == "joined"] == [3]


def test_loader_processes_and_augmentation(tmp_path: Path, undisturbed: Undisturbed) -> None:
    orders = ["1:5:second share", "hold:10:3", "0:13:second loop"]
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, args=("small", "2", *orders))
    check(result, undisturbed("small"), tmp_path, 2)


OVER_GLOO = [  # two in the making of a group, too: the second dies where the others build the next one
    ["1:6:total", "2:6:optimizer", "hold:12:4", "0:14:second loop"],
    ["2:6:open", "1:8:evaluate", "hold:12:5", "3:13:batch", "4:13:backward"],
]


@pytest.mark.parametrize("orders", OVER_GLOO)
def test_over_groups_of_torch(tmp_path: Path, orders: list[str], undisturbed: Undisturbed) -> None:
    """Some complete a meeting that others have not; a broken connection is heard before the death is known."""
    result = launch(tmp_path, SCRIPT, "-n", "3", *SLOTS, "--transport", "gloo", args=("small", "0", *orders))
    check(result, undisturbed("small"), tmp_path, sum(not order.startswith("hold") for order in orders))


# hard moments


def test_a_death_between_meeting_and_reading(tmp_path: Path, alone: Alone) -> None:
    """The next point opens in the next term, for a batch that was begun in the last: each slot gets its own share."""
    one = alone(tmp_path, SCRIPT, slots=12, args=("plain", "0"))
    four = launch(tmp_path, SCRIPT, "-n", "4", *SLOTS, args=("plain", "0", "3:6:total"), name="four")
    assert learned(four) == learned(one)


def test_a_share_that_was_drawn_under_the_last_deal_is_not_counted(tmp_path: Path) -> None:
    result = launch(tmp_path, SCRIPT, "-n", "4", "--slots", "4", args=("plain", "0", "3:6:total"))
    assert result.code == 0 and result.summary["samples"] == SAMPLES


SHORT = (
    HEAD
    + """
import os, sys, time
orders = sys.argv[1:]
def at(moment):
    if f"{run._session.worker}:{run.step}:{moment}" in orders:
        os.kill(os.getpid(), 9)
    if f"hold:{run.step}:{moment}" in orders:
        while not run._session.board.next_term and run._session.view.term < 3:   # it may have joined already
            time.sleep(0.001)
holds = [int(order.split(":")[1]) for order in orders if order.startswith("hold:")]
while run._session.joining and holds and run._session.board.see(0).step < holds[0]:
    time.sleep(0.001)   # a newcomer comes while the others hold, not before
"""
)
LOOP = """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(6):
    {before}
    for batch in loader:
        at("batch")
        {inside}
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
STEPS_LOOP = """
run.prepare(model, optimizer)
for number in run.steps(20):
    at("batch")
    for leaf in run.slots():
        F.cross_entropy(model(torch.randn(3, 13)), torch.tensor([0, 1, 2])).backward()
    optimizer.step(); optimizer.zero_grad()
"""
SUMMARY = """
import paceline.run
plain = paceline.worker.ending.summarise
paceline.worker.ending.summarise = lambda *arguments: (at("summary"), plain(*arguments))[1]
"""
STOPS = SHORT + LOOP.format(before="", inside="run.stop('enough') if run.step == 10 else None")
THAWS = SHORT + "model[0].requires_grad_(False)\n"
THAWS += LOOP.format(before="model[0].requires_grad_(epoch >= 2) if epoch == 2 else None", inside="")
ENDS = SHORT + SUMMARY + LOOP.format(before="", inside="")


@pytest.mark.parametrize(
    ("script", "orders"),
    [
        pytest.param(
            STOPS, ("1:5:batch", "hold:10:batch"), id="joins in the step in which all agree to stop",
        ),
        pytest.param(
            THAWS, ("1:14:batch", "hold:17:batch"), id="joins after a layer was thawed",
        ),
        pytest.param(
            ENDS, ("0:24:summary",), id="main dies before it has written the summary",
        ),
        pytest.param(
            SHORT + STEPS_LOOP, ("1:15:batch", "hold:19:batch"), id="joins in the last of run.steps()",
        ),
    ],
)  # fmt: skip
def test_a_hard_moment(tmp_path: Path, script: str, orders: tuple[str, ...], alone: Alone) -> None:
    want = alone(tmp_path, script, slots=12).weights
    result = launch(tmp_path, script, "-n", "2", *SLOTS, args=orders, name="two")
    assert result.weights == want


HANGS = SHORT + LOOP.format(before="", inside="stuck.acquire() if run.step == 9 and run._session.worker == 1 else None")
HANGS = HANGS.replace(
    "import os, sys, time", "import os, sys, threading, time\nstuck = threading.Lock(); stuck.acquire()"
)


def test_a_worker_that_does_not_go_on_is_ended_and_replaced(tmp_path: Path, alone: Alone) -> None:
    """A deadlock: alive, not frozen, and it would wait for ever."""
    want = alone(tmp_path, HANGS, slots=12).weights
    result = launch(tmp_path, HANGS, "-n", "2", *SLOTS, "--step-timeout", "1", name="two")
    assert result.weights == want
    assert "worker 1 is ended: others waited 1 s for it, and it did not go on" in result.err


# where nobody can take over

DIES = """
import os
run.prepare(model, optimizer, loader)
for epoch in run.epochs(50):
    for batch in loader:
        if run.step == 3 and run._session.worker in {victims}:
            os.kill(os.getpid(), 9)
        for x, y in run.slots(): F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""


def dying(*victims: int) -> str:
    return HEAD + DIES.format(victims=victims)


def test_one_worker_alone_names_the_signal(tmp_path: Path) -> None:
    result = launch(tmp_path, dying(0), "-n", "1", "--slots", "6")
    assert result.code == 1 and "worker 0 was killed by SIGKILL" in result.last_line


def test_nobody_is_left(tmp_path: Path) -> None:
    result = launch(tmp_path, dying(0, 1, 2), "-n", "3", "--slots", "6")
    assert result.code == 1 and "no worker is left" in result.last_line
    assert str(result.summary["exit"]).startswith("failed")
    assert left_processes(str(tmp_path)) == []


AT_ITS_END = (
    HEAD
    + """
import os, sys, time
dying, losses = sys.argv[2:] == ["dying"], []
while run._session.worker == 3 and run._session.board.see(0).step < 7:
    time.sleep(0.001)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(int(sys.argv[1])):
    for batch in loader:
        for x, y in run.slots():
            if dying and run._session.worker == 1 and run.step == 5:
                os.kill(os.getpid(), 9)
            # In an epoch's last step, and not before: so that its end is where the newcomer would be let in.
            while dying and run.step == 7 and not run._session.board.next_term:
                time.sleep(0.001)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
"""
)


@pytest.mark.parametrize(("epochs", "joined"), [("4", [3]), ("2", [])], ids=["later", "never"])
def test_nobody_is_let_in_where_an_epoch_ends(tmp_path: Path, alone: Alone, epochs: str, joined: list[int]) -> None:
    """Names that only the loop's body sets are used behind it, as most scripts do."""
    one = alone(tmp_path, AT_ITS_END, slots=4, args=(epochs,))
    done = launch(tmp_path, AT_ITS_END, "-n", "3", "--slots", "4", args=(epochs, "dying"))
    assert done.weights == one.weights, done.err
    assert [event["worker"] for event in done.events() if event["event"] == "joined"] == joined
    assert not [event for event in done.events() if event["event"] == "raised"]
