"""Rows at servers that are killed, given up on and told late: every share counts once, at every copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from paceline.embedding import SparseEmbedding
from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.direct import OwnServer
from paceline.servers.held_rows import HeldRows
from paceline.servers.holders import Directory
from paceline.servers.messages import (
    Advance,
    Asked,
    Done,
    Drawing,
    Gathered,
    Lay,
    Moved,
    Outline,
    Rows,
    RowUpdate,
)
from paceline.servers.row_optimizers import SGD
from paceline.servers.shelf import Shelf
from paceline.servers.tables import FRAGMENTS, pack
from paceline.servers.tables import Table as Rowed
from paceline.state.replica import Replica
from paceline.strategies.base import Point
from paceline.strategies.ps import ParameterServers
from paceline.tensors.peers import Alone
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import Plan
from paceline.wires.messages import Placed
from tests.servers.shelves import PATIENCE_S, CutLine, World
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


class Linear(Net):
    """Whose rows' gradients depend on nothing that is trained: rows that are read behind come to the same."""

    def forward(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        ids, factors = torch.randint(0, 40, (6, 3), generator=generator), torch.randn(7, generator=generator)
        found = torch.cat([self.rows(ids).sum(1), self.bags(ids)], 1)
        return (found @ factors).mean() + self.out(found.detach()).tanh().mean()


class Worker:
    def __init__(self, servers: Directory, peers: Any, strategy: str = "ps", model: type[Net] = Net) -> None:
        self.strategy, self.peers, self.model = ParameterServers(strategy), peers, model()
        self.strategy.reach(servers, Nobody(), seat(peers.rank, peers.size, LEAVES))
        replica = Replica(CPU)
        replica.add_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        replica.optimizers = [self.optimizer]
        self.strategy.attach(replica, peers, True, None)

    def train(self, first: int = 0, steps: int = STEPS) -> None:
        if self.peers.rank == 0:
            self.strategy.lay()
        self.peers.gather(1, b"laid")
        self.strategy.begin()
        for step in range(first, first + steps):
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
    with lived(World(hash((seed, plan, servers, replicas, workers)), servers, replicas, deaths=4), workers) as done:
        for worker in done:
            assert worker.strategy.report() == undisturbed


@contextmanager
def lived(world: World, workers: int, strategy: str = "ps", model: type[Net] = Net) -> Iterator[list[Worker]]:
    """Training in a world until all workers are done; behind that, all copies are the same."""
    done: list[Worker] = []
    errors: list[BaseException] = []
    table = Table(workers)
    table.barrier = threading.Barrier(workers, timeout=PATIENCE_S)

    def work(rank: int) -> None:
        try:
            worker = Worker(world, Member(table, rank), strategy, model)
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
        yield done
        assert world.fleet.placement is not None
        for fragment, copies in enumerate(world.fleet.placement.copies):
            found = [world.shelves[server]._held[fragment] for server in copies.holders]
            hashes = {_hash(each) for each in found if isinstance(each, HeldRows)}
            assert len(hashes) <= 1, f"fragment {fragment} differs at {copies.holders}"
    finally:
        for worker in done:
            worker.strategy.close()
        world.close()


def _hash(held: HeldRows) -> bytes:
    with held.changed:
        held.settle()
        return held.survey(hashed=True).sha256


def test_a_read_does_not_wait_for_an_update_that_was_refused_and_is_said_again_behind_it() -> None:
    """Of two fragments one is led elsewhere: the update of both is refused, and the read of the other one comes first."""

    def placed(number: int, second: int) -> Placed:
        return Placed(number, [[0], [second]], [[1], [1]], [[], []], {0: "0", 1: "1"})

    shelf = Shelf()
    drawing = Drawing([], [], [], tables=[Rowed(2, SGD(lr=0.1), init=0.1, admission=1, expiry=0)])
    shelf.handle(Outline(), memoryview(msgspec.msgpack.encode(drawing)))
    shelf.rearrange(placed(1, 0))
    line = CutLine(shelf, lambda: None)

    def say(by: int, call: Any, *body: memoryview) -> Future[Reply]:
        return line.call(Asked(by, call), *body)

    nothing = memoryview(Snapshot({"seed": 0, "chunks": [], "staleness": {}}).packed())
    update, ids = memoryview(msgspec.msgpack.encode(RowUpdate([1.0], [SGD(lr=0.1)]))), list(pack(np.arange(3)))
    try:
        for fragment in (0, 1):
            assert say(1, Lay([fragment], 0), nothing).result(PATIENCE_S).message == Done()
        shelf.rearrange(placed(2, 1))
        refused, read = say(1, Advance(1, [0, 1]), update), say(1, Rows(1, [0]), *ids)
        again, last = say(2, Advance(1, [0]), update), say(2, Rows(1, [0]), *ids)
        assert refused.result(PATIENCE_S).message == read.result(PATIENCE_S).message == Moved()
        assert again.result(PATIENCE_S).message == Done() and last.result(PATIENCE_S).message == Gathered([1])
        early = say(2, Rows(2, [0]), *ids)
        shelf.rearrange(placed(3, 1))
        assert early.result(PATIENCE_S).message == Moved(), "and no more once there is another layout"
    finally:
        shelf.rearrange(placed(1 << 30, 1))
        line.close()
        line.thread.join(PATIENCE_S)


# rows that are read behind


class Settling(Shelf):
    """With its thread, as in a server's process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, settling=True)
        self.thread = threading.Thread(target=self.keep_settling, daemon=True)
        self.thread.start()


@pytest.fixture(scope="module")
def in_step() -> dict[str, Any]:
    worker = Worker(OwnServer(Shelf()), Alone(CPU), "ps+rows:0", Linear)
    worker.train()
    report = worker.strategy.report()
    assert set(report["staleness"]) == {"0"}
    return report


def without(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "staleness"}


@pytest.mark.parametrize(("servers", "replicas", "workers"), [(2, 2, 2), (3, 2, 3)])
@pytest.mark.parametrize("plan", range(2))
def test_read_behind_every_share_counts_once_and_none_misses_more_than_it_may(
    seed: int, plan: int, servers: int, replicas: int, workers: int, in_step: dict[str, Any]
) -> None:
    shelves: list[Settling] = []

    def shelf(*arguments: Any) -> Settling:
        shelves.append(Settling(*arguments))
        return shelves[-1]

    world = World(hash((seed, plan, servers, replicas)), servers, replicas, deaths=4, new_shelf=shelf)
    try:
        with lived(world, workers, "ps+rows:2", Linear) as done:
            reports = [worker.strategy.report() for worker in done]
            weights = {tuple(worker.model.out.weight.flatten().tolist()) for worker in done}
    finally:
        for each in shelves:
            each.end_settling()
            each.thread.join(PATIENCE_S)
            assert not each.thread.is_alive()
    assert len(weights) == 1, "the dense part is in step"
    for report in reports:
        assert without(report) == without(in_step), "the sums are those of rows that are in step"
        assert set(report["staleness"]) <= {"0", "1", "2"}
        assert sum(report["staleness"].values()) == sum(in_step["staleness"].values())


@pytest.mark.parametrize("most", [1, 2])
def test_a_read_does_not_wait_for_updates_that_it_may_miss(most: int, in_step: dict[str, Any]) -> None:
    """Nobody takes updates in beside the calls: each read has to do so up to its bound, and does no more."""
    worker = Worker(OwnServer(Shelf(settling=True)), Alone(CPU), f"ps+rows:{most}", Linear)
    worker.train()
    missed = worker.strategy.report()["staleness"]
    in_all, step = sum(in_step["staleness"].values()), LEAVES * 2 * FRAGMENTS
    assert sum(missed.values()) == in_all <= step * STEPS
    assert set(missed) == {str(k) for k in range(most + 1)}
    assert missed[str(most)] >= in_all - most * step, "all but those of the first steps"
    assert without(worker.strategy.report()) == without(in_step), "what is asked at the end has them all"


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside a share"])
def test_what_is_read_without_gradients_misses_nothing(inside: bool) -> None:
    """Nor is it what a share has read of the same rows before."""
    worker = Worker(OwnServer(Shelf(settling=True)), Alone(CPU), "ps+rows:3", Linear)
    worker.train()
    twin = Worker(OwnServer(Shelf()), Alone(CPU), "ps", Linear)
    twin.train()
    ids = torch.arange(40)
    for home in worker.strategy._rows._homes if inside else ():
        home.begin_share(keep=True)
    behind = worker.model.rows(ids)
    with torch.no_grad():
        newest = worker.model.rows(ids)
    assert torch.equal(newest, twin.model.rows(ids).detach())
    assert not torch.equal(behind, newest)


def test_a_checkpoint_has_every_update_and_goes_on(in_step: dict[str, Any]) -> None:
    first = Worker(OwnServer(Shelf(settling=True)), Alone(CPU), "ps+rows:2", Linear)
    first.train(0, 5)
    with first.strategy.whole():
        state = first.strategy.capture()
    second = Worker(OwnServer(Shelf(settling=True)), Alone(CPU), "ps+rows:2", Linear)
    second.strategy.restore(state)
    second.train(5, STEPS - 5)
    report = second.strategy.report()
    assert without(report) == without(in_step)
    assert sum(report["staleness"].values()) == sum(in_step["staleness"].values())


def test_without_rows_there_is_nothing_to_read_behind() -> None:
    class Dense(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.rows, self.bags

    with pytest.raises(UsageError, match=r"no paceline.SparseEmbedding .* pass --strategy central$"):
        Worker(OwnServer(Shelf()), Alone(CPU), "central+rows:2", Dense)
