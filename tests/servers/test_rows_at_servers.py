"""Rows at servers that are killed, given up on and told late: every share counts once, at every copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline.embedding import SparseEmbedding
from paceline.replica import Replica
from paceline.servers.direct import OwnServer
from paceline.servers.held_rows import HeldRows
from paceline.servers.holders import Directory
from paceline.servers.shelf import Shelf
from paceline.strategies.base import Point
from paceline.strategies.ps import ParameterServers
from paceline.tensors.peers import Alone
from paceline.tensors.tree import Plan
from tests.servers.shelves import PATIENCE_S, World
from tests.servers.test_shelf import Nobody, seat, stacks
from tests.tensors.together import Member, Table

__all__ = ["stacks"]
CPU = torch.device("cpu")
LEAVES, STEPS = 5, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = SparseEmbedding(5, optimizer="adagrad", lr=0.1)
        self.bags = SparseEmbedding(2, optimizer="adam", lr=0.1, pooling="sum", admission=2, expiry=3)
        self.out = nn.Linear(7, 1)
        generator = torch.Generator().manual_seed(11)  # workers are threads, with one generator for all
        with torch.no_grad():
            self.out.weight.uniform_(-1, 1, generator=generator)
            self.out.bias.zero_()
            for table in (self.rows, self.bags):
                table.seed.copy_(torch.randint(0, 2, table.seed.shape, generator=generator))

    def forward(self, number: int) -> torch.Tensor:
        ids = torch.randint(0, 40, (6, 3), generator=torch.Generator().manual_seed(number))
        return self.out(torch.cat([self.rows(ids).sum(1), self.bags(ids)], 1)).tanh().mean()


class Worker:
    def __init__(self, servers: Directory, peers: Any) -> None:
        self.strategy, self.peers, self.model = ParameterServers(), peers, Net()
        self.strategy.reach(servers, Nobody(), seat(peers.rank, peers.size, LEAVES))
        replica = Replica(CPU)
        replica.add_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        replica.optimizers = [self.optimizer]
        self.strategy.attach(replica, peers, True, None)

    def train(self) -> None:
        if self.peers.rank == 0:
            self.strategy.lay()
        self.peers.gather(1, b"laid")
        self.strategy.begin()
        for step in range(STEPS):
            self.strategy.begin_step()
            point, plan = Point(step, 0, LEAVES), Plan.of(LEAVES, self.peers.size)
            self.strategy.open(point, plan, flat=False)
            for leaf in plan.leaves_of(self.peers.rank):
                self.strategy.weigh(1.0 + leaf)
                self.model(1000 * step + leaf).backward()
                self.strategy.fold(leaf)
            self.strategy.commit(point, step, [0, 0, 0])
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    worker = Worker(OwnServer(Shelf()), Alone(CPU))
    worker.train()
    return worker.strategy.report()


@pytest.mark.parametrize(("servers", "replicas", "workers"), [(1, 1, 2), (2, 2, 2), (3, 2, 3), (4, 3, 1)])
@pytest.mark.parametrize("plan", range(3))
def test_every_share_counts_once_at_every_copy(
    seed: int, plan: int, servers: int, replicas: int, workers: int, undisturbed: dict[str, Any]
) -> None:
    world = World(hash((seed, plan, servers, replicas, workers)), servers, replicas, deaths=4)
    done: list[Worker] = []
    errors: list[BaseException] = []
    table = Table(workers)
    table.barrier = threading.Barrier(workers, timeout=PATIENCE_S)

    def work(rank: int) -> None:
        try:
            worker = Worker(world, Member(table, rank))
            done.append(worker)
            worker.train()
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)
            table.barrier.abort()

    try:
        world.live([threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(workers)])
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        print("\n".join(world.log))
        world.settle()
        for worker in done:
            assert worker.strategy.report() == undisturbed
        assert world.fleet.placement is not None
        for fragment, copies in enumerate(world.fleet.placement.copies):
            held = [world.shelves[server]._held[fragment] for server in copies.holders]
            hashes = {each.survey(hashed=True).sha256 for each in held if isinstance(each, HeldRows)}
            assert len(hashes) <= 1, f"fragment {fragment} differs at {copies.holders}"
    finally:
        for worker in done:
            worker.strategy.close()
        world.close()
