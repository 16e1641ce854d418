"""Federated: the same bits whoever trains which client and whoever is killed; what counts, and what the run says of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.centre_kills import MOMENTS, SCRIPT, STRATEGY, killed
from tests.alone import Alone
from tests.end_to_end.killing import Doomed
from tests.end_to_end.launching import BODY, HEAD, Result, launch, paceline


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
    """Of a run of one, without servers."""
    return alone(tmp_path_factory.mktemp("alone"), SCRIPT, strategy=STRATEGY).weights


def participants(done: Result) -> list[list[int]]:
    return [each["clients"] for each in done.summary["by_round"]]


def test_workers_main_and_the_coordinator_are_killed_and_nothing_of_it_is_in_the_weights(
    tmp_path: Path, weights: str
) -> None:
    plan = ("kill worker:1 @step 1", "kill main @step 3", "kill coordinator @step 4")
    faults = [word for fault in plan for word in ("--fault", fault)]
    done = launch(tmp_path, SCRIPT, "-n", "3", "--servers", "2", "--strategy", STRATEGY, *faults, args=("0.005",))
    assert done.weights == weights, done.err
    assert [event["why"] for event in done.events() if event["event"] == "fault"] == list(plan)
    assert [each["round"] for each in done.summary["by_round"]] == list(range(6))
    assert all(len(clients) == 5 for clients in participants(done)), participants(done)
    assert done.summary["bytes_moved"] == sum(each["bytes"] for each in done.summary["by_round"]) > 0
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0 and "a receipt for each round" in " ".join(proven.stdout.split()), proven.stdout


@pytest.mark.parametrize("machines", [1, 2])
def test_the_centre_is_killed_at_a_moment_of_a_round(tmp_path: Path, weights: str, seed: int, machines: int) -> None:
    moment = random.Random(seed + machines).choice(MOMENTS)
    it = killed(tmp_path, seed, moment, workers=2, servers=2, want=weights, machines=machines)
    print(moment, it)
    assert not it.odd and it.led_s < 3.0


def test_all_processes_are_killed_and_the_run_goes_on_from_a_checkpoint(tmp_path: Path, weights: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace("float(sys.argv[1]) if len(sys.argv) > 1 else 0.0", "0.01"))
    doomed = Doomed(tmp_path, script, 2, ("--servers", "2", "--strategy", STRATEGY, "--checkpoint-every", "1"))
    doomed.wait_for(lambda: len(list((doomed.folder / "checkpoints").glob("step-*/manifest.json"))) >= 2)
    doomed.kill()
    again = paceline("resume", "it", "-n", "1", "--servers", "1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    summary = json.loads((doomed.folder / "summary.json").read_text())
    assert summary["weights_sha256"] == weights
    assert [each["round"] for each in summary["by_round"]] == list(range(6))
    assert paceline("verify", "it", cwd=tmp_path).returncode == 0


EQUAL = (
    HEAD.replace("import torch,", "import sys\nimport torch,")
    .replace(", momentum=0.9", "")
    .replace("batch_size=24", "batch_size=int(sys.argv[1])")
    + BODY.replace("epochs(2)", "epochs(10)")
    + 'run.save(model.state_dict(), "weights.pt")\n'
)


def test_one_step_of_all_clients_with_as_much_data_each_is_a_step_of_ps(tmp_path: Path, alone: Alone) -> None:
    found = {}
    for strategy, batch, slots in (("ps", "96", 4), ("federated:clients=4,steps=1", "24", 1)):
        done = alone(tmp_path, EQUAL, args=(batch,), name=strategy.partition(":")[0], strategy=strategy, slots=slots)
        assert done.code == 0 and done.summary["steps"] == 10, done.err
        tensors = torch.load(tmp_path / "weights.pt").values()
        found[strategy] = torch.cat([tensor.double().flatten() for tensor in tensors])
    one, other = found.values()
    assert (one - other).norm() / one.norm() <= 1e-6
    assert one.norm() > 0


OWN = """
import time, torch, torch.nn as nn, torch.nn.functional as F
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init()
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def opened(folder):
    g = torch.Generator().manual_seed(int(folder.name))
    return TensorDataset(torch.randn(12, 5, generator=g), torch.randint(0, 3, (12,), generator=g))

site = Path("sites") / str(run._session.worker % 2)
loader = DataLoader(paceline.ClientFolders(site, opened), batch_size=4)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(6):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.01)
"""


def test_a_client_s_own_folder_is_trained_by_who_has_it_and_lacks_when_that_one_is_dead(tmp_path: Path) -> None:
    for site, client in ((0, 0), (0, 2), (1, 1), (1, 3)):
        (tmp_path / "sites" / str(site) / str(client)).mkdir(parents=True)
    flags = ("-n", "2", "--servers", "2", "--strategy", "federated:clients=4", "--fault", "kill worker:1 @step 2")
    done = launch(tmp_path, OWN, *flags)
    assert done.code == 0, done.err
    assert "2 of them elsewhere" in done.err
    came = participants(done)
    assert came[:2] == [[0, 1, 2, 3]] * 2 and came[-1] == [0, 2], came
    said = [event["why"] for event in done.events() if event["event"] == "round"]
    assert said[-1] == "2 clients counted, with 24 samples; 1, 3 did not come in time"


LATE = (
    HEAD
    + """
import time
from pathlib import Path
from paceline.servers.messages import Ongoing
run.prepare(model, optimizer, loader)
strategy, begun = run._strategy, Path("begun")
for epoch in run.epochs(3):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        if run._session.worker == 1 and not begun.exists():
            begun.touch()
            while strategy._ask(Ongoing(strategy._stretch)).message.yes:
                time.sleep(0.001)
        while not begun.exists():
            time.sleep(0.001)
"""
)


def test_a_client_is_late_when_a_quorum_has_come(tmp_path: Path) -> None:
    """Worker 1 goes on with its first client only when the round is over."""
    strategy = "federated:rounds=3,clients=6,quorum=4,grace=0.05"
    done = launch(tmp_path, LATE, "-n", "2", "--servers", "1", "--strategy", strategy)
    assert done.code == 0, done.err
    rounds = done.summary["by_round"]
    assert all(len(each["clients"]) >= 4 and len(each["clients"]) + len(each["lacking"]) == 6 for each in rounds)
    assert rounds[0]["lacking"], rounds
    assert "time decides who is among the 4 or more of a round" in done.err
    assert paceline("verify", "it", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("scheduler", "told"), [("OneCycleLR(optimizer, 0.1, total_steps=3)", 1), ("ReduceLROnPlateau(optimizer)", 0)]
)
def test_a_schedule_goes_by_rounds_and_the_run_says_so(tmp_path: Path, alone: Alone, scheduler: str, told: int) -> None:
    planned = f"scheduler = torch.optim.lr_scheduler.{scheduler}\nrun.prepare(scheduler)\n"
    stepped = BODY.replace("zero_grad()", "zero_grad(); scheduler.step()" if told else "zero_grad()")
    known = "assert scheduler.last_epoch == 3, scheduler.last_epoch\n" if told else ""
    done = alone(tmp_path, HEAD + planned + stepped + known, strategy="federated:rounds=3,clients=4")
    assert done.code == 0, done.err
    assert done.err.count("goes on by one each round") == told
    assert ("(OneCycleLR)" in done.err and "plan it for 3 rounds" in done.err) is bool(told)


def test_half_drop_out_at_random_and_fedprox_trains_with_those_that_remain(tmp_path: Path, alone: Alone) -> None:
    """One of three rounds has too few of them."""
    found = []
    for name, prox in (("plain", ""), ("prox", ",prox=5")):
        done = alone(
            tmp_path, HEAD + BODY, name=name, strategy=f"federated:rounds=3,clients=4,epochs=2,drop=0.5,quorum=2{prox}"
        )
        found.append(done.weights)
        rounds = done.summary["by_round"]
        assert all(len(each["clients"]) != 1 for each in rounds) and any(each["dropped"] for each in rounds)
        assert all(len(each["clients"] + each["dropped"] + each["lacking"]) <= 4 for each in rounds)
    assert found[0] != found[1]


def test_fedprox_pulls_each_parameter_once_however_many_optimizers_there_are(tmp_path: Path, alone: Alone) -> None:
    apart = (
        "halves = [torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in (model[0], model[2])]\n"
        + BODY.replace("optimizer, loader", "*halves, loader").replace(
            "optimizer.step(); optimizer.zero_grad()", "[each.step() for each in halves]; model.zero_grad()"
        )
    )
    found = [
        alone(tmp_path, HEAD + body, name=name, strategy="federated:rounds=3,clients=4,epochs=2,prox=0.5").weights
        for name, body in (("one", BODY), ("two", apart))
    ]
    assert found[0] == found[1]


MISTAKES = {
    "leaves the loop in a client": (
        BODY.replace("optimizer.zero_grad()", "optimizer.zero_grad(); break"),
        "the loop over the loader was left in the middle of a client",
    ),
    "thaws a layer": (
        "model[2].requires_grad_(False)\n"
        + BODY.replace("    for batch", "    model[2].requires_grad_(epoch > 0)\n    for batch"),
        "a frozen parameter has become trainable, and the others do not know",
    ),
    "draws its own batches": (
        "run.prepare(model, optimizer)\nfor step in run.steps(3): pass\n",
        "trains clients on their data, and run.steps() has none",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_clients_cannot_do_is_refused_in_a_sentence(tmp_path: Path, alone: Alone, mistake: str) -> None:
    body, words = MISTAKES[mistake]
    done = alone(tmp_path, HEAD + body, strategy="federated:clients=4")
    assert done.code == 2 and words in done.last_line, done.err
