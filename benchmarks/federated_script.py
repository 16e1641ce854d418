"""A small federated training, in which the centre can be killed at a moment of a round.

    paceline run -n 2 --servers 3 --strategy federated:rounds=6,clients=8 benchmarks/federated_script.py [PAUSE [ROUND:MOMENT]]

The first worker that comes to that moment kills the server that leads the register, and notes when. Shared by
benchmarks/centre_kills.py and the tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.servers.messages import Bring

MOMENTS = {
    "begin_stretch": "a round begins",
    "take": "a client begins",
    "bring": "a client has trained",
    "halfway": "what it brings is at some servers, and not at others",
    "turn": "it is everywhere, and not counted yet; or the next client is asked for",
    "_end_round": "the round is over, and θ is not the next one yet",
    "pull": "θ is fetched",
    "whole": "a checkpoint is taken",
}


def kill_the_centre() -> None:
    """Once in the run."""
    holders, place = strategy._holders, strategy._place
    server = holders._layout.holders[place][0]
    events = map(json.loads, (run.dir / "events.jsonl").read_text().splitlines())
    pid = next(event["pid"] for event in events if event["event"] == "server started" and event["server"] == server)
    try:
        note = os.open(run.dir / "killed.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.kill(pid, signal.SIGKILL)
    os.write(note, json.dumps({"time": time.time(), "server": server, "round": strategy._round}).encode())
    os.close(note)


def kill_at(number: int, moment: str) -> None:
    holder, name = (strategy._holders, "out") if moment == "halfway" else (strategy, moment)
    plain, said = getattr(holder, name), []

    def called(*arguments: Any, **more: Any) -> Any:
        if moment == "halfway":
            said.append(arguments[1])
            if not (len(said) > 1 and isinstance(said[-1], Bring) and isinstance(said[-2], Bring)):
                return plain(*arguments, **more)
        if strategy._round + (moment == "begin_stretch" and run.step > 0) == number:
            kill_the_centre()
        return plain(*arguments, **more)

    setattr(holder, name, called)


run = paceline.init(seed=3)
strategy: Any = run._strategy
pause = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
order = sys.argv[2] if len(sys.argv) > 2 else ""
g = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(400, 20, generator=g), torch.randint(0, 4, (400,), generator=g))
loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
run.prepare(model, optimizer, scheduler, loader)
for epoch in run.epochs(6):
    if order and epoch == 0:
        number, moment = order.split(":")
        kill_at(int(number), moment)
    for _batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(pause)
    counts = run.evaluate(lambda batch: {"n": len(batch[0])}, DataLoader(data, batch_size=50))
    run.log(n=counts["n"])
    assert scheduler.last_epoch == run.step == epoch + 1, (scheduler.last_epoch, run.step, epoch)
