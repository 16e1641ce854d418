"""Shares that go to the servers one by one: whoever computes them, nobody waits, and all come to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.servers.clocks import BEHIND
from paceline.servers.direct import OwnServer
from paceline.servers.held import Held, as_bytes
from paceline.servers.messages import Agreed, Ended, Lay, Meet, Part, Summed, Word
from paceline.servers.peers import stretch
from paceline.servers.shelf import Shelf
from paceline.state.hash import weights_sha256
from paceline.state.replica import Replica
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.backup import Backups
from paceline.strategies.base import Point, Served
from paceline.tensors.peers import Alone, SharesWanted
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import Plan
from tests.servers.shelves import PATIENCE_S, World
from tests.servers.test_held import Script, say
from tests.servers.test_shelf import Nobody, seat, stacks
from tests.tensors.arithmetic import bits
from tests.tensors.together import Member, Table

__all__ = ["stacks"]
CPU = torch.device("cpu")
LEAVES, STEPS, LAST = 4, 9, 99


# one fragment, where some are behind


def behind(script: Script) -> Held:
    held = Held(script.fragment, torch.float32, script.carried, since=1, behind=BEHIND)
    say(held, *script.laid())
    return held


def word(step: int, worker: int, *lanes: int) -> Word:
    return Word(step, worker, 0.5, list(lanes), [0])


def bring(held: Held, leaf: int, lanes: bytes) -> None:
    """As a primary does it with a worker's part."""
    part = Part(1, 0, LEAVES, leaf, leaf + 1, [0], lanes)
    body = torch.full((len(held.value),), float(leaf))
    with held.changed:
        point = held.point(part)
        total = point.total if point.total is not None else point.add((leaf, leaf + 1), body, lanes)
        if total is not None:
            held.do(Summed(1, 0, LEAVES, [0], held.agreement(part)), as_bytes(total))


def test_a_sum_is_sealed_with_the_lanes_of_its_shares_and_the_last_word_of_everybody() -> None:
    held = behind(Script())
    say(held, word(1, 7, 3), b"")
    say(held, word(0, 8, 4), b"")
    for leaf in (2, 0, 2, 3, 1, 2):
        bring(held, leaf, bytes([leaf]))
    agreed = held.met(Meet(1, 0, LEAVES, 1, wait=False)).agreed
    say(held, word(1, 8, 5), b"")
    bring(held, 2, b"late")
    assert held.met(Meet(1, 0, LEAVES, 1, wait=False)).agreed == agreed, "who comes later gets the same"
    found = msgspec.msgpack.decode(agreed, type=Agreed)
    assert found.rows == [bytes([leaf]) for leaf in range(LEAVES)]
    assert {worker: (said.step, said.lanes) for worker, said in found.words.items()} == {7: (1, [3]), 8: (0, [4])}
    assert held.met(Meet(1, 0, LEAVES, 1, wait=False)).steps == {7: 1, 8: 1}


def test_a_term_is_over_at_a_point_only_if_the_sum_is_not_complete() -> None:
    held, ended, asked = behind(Script()), Ended(1, 0, LEAVES, 1, [0]), Meet(1, 0, LEAVES, 1, wait=False)
    for leaf in (0, 1, 2):
        bring(held, leaf, b"lanes")
    assert not held.met(asked).ended and held.points[1, 0].lacking() == [3]
    say(held, ended, b"")
    assert held.met(asked).ended and not held.met(Meet(1, 0, LEAVES, 2, wait=False)).ended
    bring(held, 3, b"lanes")
    assert held.met(asked).agreed and held.points[1, 0].lacking() == []
    say(held, Ended(1, 0, LEAVES, 2, [0]), b"")
    assert not held.met(Meet(1, 0, LEAVES, 2, wait=False)).ended, "it was complete before"


def test_values_of_the_last_versions_are_kept_as_they_were_and_a_copy_has_them_too() -> None:
    script = Script()
    held = behind(script)
    for version in range(1, 7):
        held.value.fill_(float(version))
        say(held, Lay([0], version), bytes(as_bytes(held.value)) + bytes(Snapshot([[{}], [{}]]).packed()))
    say(held, word(5, 1), b"")
    say(held, Ended(6, 0, LEAVES, 3, [0]), b"")
    copy = Held(script.fragment, torch.float32, script.carried, since=1, behind=BEHIND)
    for said, bodies in held.all_said():
        say(copy, said, b"".join(bodies))
    for each in (held, copy):
        assert [float(each.values(version)[0]) for version in range(6 - BEHIND, 7)] == [3.0, 4.0, 5.0, 6.0]
        with pytest.raises(ValueError, match="version 2 of the values is not there any more"):
            each.values(2)
    assert bits(copy.value) == bits(held.value) and copy.words == held.words
    assert copy.met(Meet(6, 0, LEAVES, 3, wait=False)).ended


# workers and servers in one process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Linear(40, 30)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(number))
        return self.second(torch.tanh(self.norm(self.first(x)))).square().mean()


@dataclass
class Progress:
    """To which step each worker has come; a slow one waits for the others to be ahead."""

    at: dict[int, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def come(self, worker: int, step: int) -> None:
        with self.changed:
            self.at[worker] = step
            self.changed.notify_all()

    def until(self, worker: int, step: int) -> None:
        with self.changed:
            there = self.changed.wait_for(lambda: self.at.get(worker, 0) >= step, PATIENCE_S / 2)
            assert there, f"worker {worker} waits for a slow one, at step {self.at.get(worker)}"


class Doubling(Backups):
    """Who computes what twice is the test's to say."""

    twice: dict[int, tuple[int, ...]]

    def _doubled(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        return self.twice


class Worker:
    def __init__(self, strategy: AllReduce, peers: Any) -> None:
        self.strategy, self.peers, self.model = strategy, peers, Net()
        replica = Replica(CPU)
        replica.add_model(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        replica.optimizers = [self.optimizer]
        self.weights: list[str] = []
        self.computed: list[tuple[int, int]] = []
        self.linger: Callable[[int], None] = lambda step: None
        self.begins: Callable[[int], None] = lambda step: None
        strategy.attach(replica, peers, True, None)

    def train(self) -> None:
        if isinstance(self.strategy, Served):
            if self.peers.rank == 0:
                self.strategy.lay()
            self.peers.gather(1, b"laid")
            self.strategy.begin()
        for step in range(STEPS):
            self.begins(step)
            self.strategy.begin_step()
            self._reduce(step)
            if step % 3 == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.weights.append(weights_sha256(self.model.state_dict()))
        self.begins(LAST)

    def _reduce(self, step: int) -> None:
        point, plan = Point(step, 0, LEAVES), Plan.of(LEAVES, self.peers.size)
        self.strategy.open(point, plan, flat=False)
        due = plan.leaves_of(self.peers.rank)
        while True:
            for leaf in due:
                if self.strategy.begin_share(leaf):
                    self.strategy.weigh(1.0)
                    self.model(1000 * step + leaf).backward()
                    self.linger(step)
                    self.strategy.fold(leaf)
                    self.computed.append((step, leaf))
            try:
                rows = self.strategy.commit(point, step, [0, 5, 1, 0, 0, 0])
                if isinstance(self.strategy, Backups):
                    assert rows[:, 3:6].sum(axis=0).tolist() == [LEAVES * 2, LEAVES, 6], "each share counts once"
                return
            except SharesWanted as wanted:
                due = wanted.leaves


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    worker = Worker(AllReduce(), Alone(CPU))
    worker.train()
    return worker.weights


def none(worker: Worker, rank: int) -> None:
    worker.strategy.twice = {}  # type: ignore[attr-defined]


@contextmanager
def together(world: World, count: int, prepare: Callable[[Worker, int], None]) -> Iterator[list[Worker]]:
    """Workers that have trained; they and the world are closed afterwards."""
    done: list[Worker] = []
    try:
        done += _trained(world, count, prepare)
        yield done
    finally:
        for worker in done:
            worker.strategy.close()
        world.close()


def _trained(world: World, count: int, prepare: Callable[[Worker, int], None]) -> list[Worker]:
    table = Table(count)
    table.barrier = threading.Barrier(count, timeout=PATIENCE_S)
    workers: dict[int, Worker] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            strategy = Doubling("ps+backup:1")
            strategy.reach(world, Nobody(), seat(rank, count, LEAVES))  # type: ignore[arg-type]
            workers[rank] = Worker(strategy, Member(table, rank))
            prepare(workers[rank], rank)
            workers[rank].train()
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)
            table.barrier.abort()

    world.live([threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)])
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [workers[rank] for rank in range(count)]


@pytest.mark.parametrize(("servers", "deaths"), [(1, 0), (3, 0), (3, 4), (2, 4)])
def test_nobody_waits_for_a_slow_worker_which_comes_to_the_same_weights_at_every_step(
    seed: int, servers: int, deaths: int, undisturbed: list[str]
) -> None:
    """Worker 2 is done with a share only when worker 0 has gone on to the step after the next."""
    world, progress = World(hash((seed, servers, deaths)), servers, min(2, servers), deaths), Progress()

    def prepare(worker: Worker, rank: int) -> None:
        worker.begins = lambda step: progress.come(rank, step)
        worker.strategy.twice = {0: (2,)}  # type: ignore[attr-defined]
        if rank == 2:
            worker.linger = lambda step: progress.until(0, step + 2)

    with together(world, LEAVES, prepare) as done:
        for worker in done:
            assert worker.weights == undisturbed
        slow = [step for step, _ in done[2].computed]
        assert slow == sorted(set(slow)) and 0 < len(slow) < STEPS - 2, "it passes over what is done without it"
        assert {(step, 2) for step in range(STEPS)} <= {*done[0].computed, *done[2].computed}


def test_the_others_wait_for_one_that_is_further_behind_than_servers_remember(undisturbed: list[str]) -> None:
    world, progress, seen, lingers = World(1, 1, 1, 0), Progress(), [], threading.Event()

    def prepare(worker: Worker, rank: int) -> None:
        def begins(step: int) -> None:
            if rank == 0 and step == 1:
                assert lingers.wait(60), "worker 2 would find its share done"
            progress.come(rank, step)

        worker.begins = begins
        worker.strategy.twice = {0: (2,)}  # type: ignore[attr-defined]
        if rank == 2:

            def linger(step: int) -> None:
                if step == 1:
                    lingers.set()
                    progress.until(0, step + BEHIND)
                    progress.until(3, step + BEHIND)
                    seen.append(max(progress.at.values()))

            worker.linger = linger

    with together(world, LEAVES, prepare) as done:
        assert all(worker.weights == undisturbed for worker in done)
        assert seen == [1 + BEHIND], "at step 1 its last word was of step 0"


def test_a_share_that_does_not_come_is_computed_by_whoever_waits(
    monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
) -> None:
    """Nobody was told to: worker 2 is stuck all of a sudden."""
    monkeypatch.setattr("paceline.strategies.backup._PATIENCE_S", 0.02)
    world, progress = World(1, 2, 2, 0), Progress()

    def prepare(worker: Worker, rank: int) -> None:
        none(worker, rank)
        worker.begins = lambda step: progress.come(rank, step)
        if rank == 2:
            worker.linger = lambda step: progress.until(0, 5) if step == 3 else None

    with together(world, LEAVES, prepare) as done:
        assert all(worker.weights == undisturbed for worker in done)
        assert (3, 2) in [at for worker in done[:2] + done[3:] for at in worker.computed]


def test_a_share_that_only_the_first_fragment_has_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
) -> None:
    """As where a worker has died, and with it a server that had the rest: the point looks met and is not."""
    monkeypatch.setattr("paceline.strategies.backup._PATIENCE_S", 0.02)
    world, progress = World(1, 2, 1, 0), Progress()

    def prepare(worker: Worker, rank: int) -> None:
        none(worker, rank)
        worker.begins = lambda step: progress.come(rank, step)
        peers, send = worker.strategy._shares, worker.strategy._shares._send  # type: ignore[attr-defined]
        holders = peers._holders

        def torn(leaves: Iterable[int]) -> None:
            if peers.at[0] != 3:
                send(leaves)
                return
            (batch,) = [batch for batch in holders.batches(range(len(peers._fragments()))) if 0 in batch]
            for leaf in list(leaves):
                flats, row = peers._sums.parts.of(0), peers._hand.rows[leaf]
                body = [stretch(flats, peers._fragments()[k]) for k in batch]
                holders.wait([holders.out(batch, Part(3, 0, LEAVES, leaf, leaf + 1, batch, row), *body)])
            progress.until(0, 4)

        if rank == 2:
            peers._send = torn

    with together(world, LEAVES, prepare) as done:
        assert all(worker.weights == undisturbed for worker in done)
        assert (3, 2) in [at for worker in done[:2] + done[3:] for at in worker.computed]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_bits_of_all_reduce_where_workers_carry_several_slots(count: int, undisturbed: list[str]) -> None:
    world = World(count, 2, 2, 0)
    with together(world, count, none) as done:
        assert all(worker.weights == undisturbed for worker in done)


# what is refused


def lone() -> Worker:
    strategy = Backups("ps+backup:1")
    strategy.reach(OwnServer(Shelf()), Nobody(), seat(0, 1, LEAVES))  # type: ignore[arg-type]
    return Worker(strategy, Alone(CPU))


def test_what_cannot_be_computed_by_another_worker_is_refused_in_a_sentence() -> None:
    worker = lone()
    with pytest.raises(UsageError, match=r"a loop without run.slots\(\) with --strategy ps\+backup:1"):
        worker.strategy.open(Point(0, 0, LEAVES), Plan.of(LEAVES, 1), flat=True)
    with pytest.raises(UsageError, match="a second reduce point in a step"):
        worker.strategy.open(Point(0, 1, LEAVES), Plan.of(LEAVES, 1), flat=False)
    worker.strategy.close()


def test_a_second_optimizer_step_is_refused() -> None:
    worker = lone()
    worker.train()
    with pytest.raises(UsageError, match="two optimizer steps in one step"):
        worker.optimizer.step()
    worker.strategy.close()


def test_several_optimizers_are_refused() -> None:
    strategy, replica, model = Backups("ps+backup:1"), Replica(CPU), Net()
    strategy.reach(OwnServer(Shelf()), Nobody(), seat(0, 1, LEAVES))  # type: ignore[arg-type]
    replica.add_model(model)
    replica.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.second)]
    with pytest.raises(UsageError, match=r"--strategy ps\+backup:1 takes one optimizer"):
        strategy.attach(replica, Alone(CPU), True, None)
