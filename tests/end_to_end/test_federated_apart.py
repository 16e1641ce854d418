"""Federated on several machines: the bits of one worker whichever process or machine is killed, and data that is on one alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import ended, paceline
from tests.end_to_end.machines import Spread, one_of_each, spread, summary_of
from tests.etcd import Etcd
from tests.network import Network

FLAGS = ("-n", "2", "--servers", "2", "--lease", "1.5")
STRATEGY = "federated:rounds=5,clients=8,sample=5,alpha=0.5,outer=adam,lr=0.05"

HELD = """
import json, sys, time, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
run = paceline.init(seed=3)
strategy, plain, mine = run._strategy, run._strategy.bring, []
holds = [int(number) for number in sys.argv[1:]]

def bring(leaf):
    moved = plain(leaf)
    mine.append((strategy._round, leaf))
    with open(run.dir / f"brought-{strategy._round}", "a") as file:
        file.write(f"{leaf}\\n")
    return moved

def hold():
    '''In the middle of a round: this worker has brought a client, which counts, and has the next in hand. Until it is let go;
    or has heard that somebody leaves, which needs the round's end.'''
    number = strategy._round
    if number not in holds or not any(it == number for it, _ in mine):
        return
    leads = strategy._holders._layout.holders[strategy._place][0]
    mark = run.dir / f"held-{number}-{run._session.worker}"
    mark.with_suffix(".new").write_text(json.dumps({"leads": leads}))
    mark.with_suffix(".new").rename(mark)
    board, view = run._session.board, run._session.view
    while not (run.dir / f"go-{number}").exists() and board.next_term <= view.term:
        time.sleep(0.002)

strategy.bring = bring
"""
SCRIPT = (
    HELD
    + """
g = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(200, 13, generator=g), torch.randint(0, 4, (200,), generator=g))
loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(5):
    for batch in loader:
        hold()
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
    assert run.step == epoch + 1, (run.step, epoch)
    run.log(step_is=run.step)
"""
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
    """Of one worker, left alone."""
    return alone(tmp_path_factory.mktemp("alone"), SCRIPT, strategy=STRATEGY).weights


def wait_for_holds(run: Spread, number: int, workers: int) -> int:
    """Until so many workers are in the middle of this round; the server that leads its register."""
    found: list[Path] = []

    def held() -> bool:
        found[:] = [path for path in run.folder.glob(f"held-{number}-*") if path.suffix != ".new"]
        return len(found) >= workers

    run.wait_for(held, f"{workers} workers in the middle of round {number}")
    return int(json.loads(found[0].read_text())["leads"])


def let_go(run: Spread, number: int) -> None:
    (run.folder / f"go-{number}").touch()


def machine_of(run: Spread, server: int) -> int:
    return int(run.wait_for_event("server started", server=server)["machine"])


def check_rounds(run: Spread, summary: dict[str, Any]) -> None:
    """One after the other, all with their clients."""
    assert [each["round"] for each in summary["by_round"]] == list(range(5)), summary["by_round"]
    assert all(len(each["clients"]) == 5 and not each["lacking"] for each in summary["by_round"])
    told = [event["round"] for event in run.every("round")]
    assert told == sorted({*told}), told
    proven = paceline("verify", "it", cwd=run.folder.parents[1])
    assert proven.returncode == 0, proven.stdout


def brought(run: Spread, number: int) -> list[int]:
    return sorted(map(int, (run.folder / f"brought-{number}").read_text().split()))


def test_two_machines_train_what_one_worker_trains(tmp_path: Path, weights: str) -> None:
    with spread(tmp_path, SCRIPT, 2, *FLAGS, "--strategy", STRATEGY) as run:
        summary = summary_of(run)
        assert [len(run.every("server started", machine=machine)) for machine in (0, 1)] == [1, 1]
    assert summary["weights_sha256"] == weights
    check_rounds(run, summary)
    one_of_each(run)


def test_the_machine_with_the_centre_is_killed_in_mid_round(tmp_path: Path, weights: str) -> None:
    """With a client that has arrived, and one in its worker's hand."""
    with spread(tmp_path, SCRIPT.replace("sys.argv[1:]", "[2]"), 2, *FLAGS, "--strategy", STRATEGY) as run:
        assert machine_of(run, wait_for_holds(run, 2, workers=2)) == 1
        run.kill_machine(1)
        let_go(run, 2)
        done = ended(run)
    assert done.weights == weights
    assert brought(run, 2) == [0, 1, 2, 3, 4]
    check_rounds(run, done.summary)
    one_of_each(run)


def test_the_centre_is_killed_in_mid_round_and_then_the_first_machine_to_which_it_went(
    tmp_path: Path, weights: str, etcd: Etcd
) -> None:
    script, flags = SCRIPT.replace("sys.argv[1:]", "[1, 3]"), ("--strategy", STRATEGY, "--store", etcd.address)
    with spread(tmp_path, script, 2, *FLAGS, *flags) as run:
        centre = wait_for_holds(run, 1, workers=2)
        settled = len(run.every("settled"))
        os.kill(run.servers_on(1)[centre], signal.SIGKILL)
        run.wait_for(lambda: len(run.every("settled")) > settled, "another one in its place")
        let_go(run, 1)
        assert machine_of(run, wait_for_holds(run, 3, workers=2)) == 0
        run.kill_machine(0)
        let_go(run, 3)
        assert run.wait_for_event("leading")["machine"] == 1
        summary = summary_of(run)
    assert summary["weights_sha256"] == weights
    assert brought(run, 1) == brought(run, 3) == [0, 1, 2, 3, 4]
    check_rounds(run, summary)
    one_of_each(run)


@pytest.mark.needs_root
def test_the_machine_with_the_centre_is_cut_off_and_comes_back(tmp_path: Path, weights: str) -> None:
    """There are never two centres: what was brought on the other side of the cut counts once or not at all."""
    script = SCRIPT.replace("sys.argv[1:]", "[1, 3]")
    flags = ("-n", "3", "--servers", "3", "--lease", "2", "--strategy", STRATEGY)
    with Network(3) as network:
        hosts, popens = [m.address for m in network.machines], [m.popen for m in network.machines]
        with (
            Etcd(3, hosts, popens, ["--pre-vote"]) as etcd,
            spread(tmp_path, script, 3, *flags, "--store", etcd.address, network=network) as run,
        ):
            centre = wait_for_holds(run, 1, workers=2)
            machine = machine_of(run, centre)
            network.machines[machine].cut()
            let_go(run, 1)
            run.wait_for_event("server ended", server=centre, why=f"was lost with machine {machine}")
            wait_for_holds(run, 3, workers=2)
            network.machines[machine].mend()
            run.wait_for(lambda: [*run.servers_on(machine)] not in ([], [centre]), "another server on it")
            let_go(run, 3)
            summary = summary_of(run)
    assert summary["weights_sha256"] == weights
    check_rounds(run, summary)
    one_of_each(run)


def test_a_machine_leaves_and_another_one_comes(tmp_path: Path, weights: str) -> None:
    """Its worker at a round's end; all that its server held has moved away by then."""
    with spread(tmp_path, SCRIPT.replace("sys.argv[1:]", "[1, 3]"), 2, *FLAGS, "--strategy", STRATEGY) as run:
        wait_for_holds(run, 1, workers=2)
        run.agents[0].send_signal(signal.SIGTERM)
        assert run.agents[0].wait(60) == 0 and not run.servers_on(1) and not run.workers_on(1)
        wait_for_holds(run, 3, workers=1)
        run.join()
        run.wait_for(lambda: len(run.servers_on(2)) == 1 == len(run.servers_on(0)), "a server on each machine")
        let_go(run, 3)
        done = ended(run)
    assert done.weights == weights
    check_rounds(run, done.summary)


FOLDERS = (
    HELD.replace("sys.argv[1:]", "[1, 3, 5]")
    + """
from pathlib import Path

def opened(folder):
    g = torch.Generator().manual_seed(int(folder.name))
    return TensorDataset(torch.randn(12, 5, generator=g), torch.randint(0, 3, (12,), generator=g))

disk = Path("disks") / str(min(run._session.ticket.machine, 1))  # the third machine has the disk of the second
loader = DataLoader(paceline.ClientFolders(disk, opened), batch_size=4)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(7):
    for batch in loader:
        hold()
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
"""
)


def test_clients_are_trained_where_their_folders_are_and_lack_while_their_machine_is_lost(tmp_path: Path) -> None:
    """What came of one of them before its machine was lost counts all the same."""
    for disk, client in ((0, 0), (0, 2), (1, 1), (1, 3)):
        (tmp_path / "disks" / str(disk) / str(client)).mkdir(parents=True)
    with spread(tmp_path, FOLDERS, 2, *FLAGS, "--strategy", "federated:clients=4") as run:
        wait_for_holds(run, 1, workers=2)
        run.kill(*run.workers_on(1))
        run.wait_for(
            lambda: brought(run, 1) == [0, 1, 3], "who comes in its place, and trains the other of its clients"
        )
        let_go(run, 1)
        wait_for_holds(run, 3, workers=2)
        run.kill_machine(1)
        let_go(run, 3)
        wait_for_holds(run, 5, workers=1)
        run.join()
        run.wait_for(lambda: 1 in brought(run, 5), "a machine with that disk")
        let_go(run, 5)
        done = ended(run)
    assert done.code == 0, done.err
    everybody, here = [0, 1, 2, 3], [0, 2]
    rounds = [each["clients"] for each in done.summary["by_round"]]
    assert rounds == [everybody] * 3 + [[0, 1, 2], here] + [everybody] * 2, rounds
    assert [each["lacking"] for each in done.summary["by_round"]][3:5] == [[3], [1, 3]]
    proven = paceline("verify", "it", cwd=tmp_path)
    assert proven.returncode == 0, proven.stdout
