"""Servers that are killed, given up on and told late: what was answered is in the values, once."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from paceline.data.receipts import Tally
from paceline.servers.calling import Reply
from paceline.servers.messages import Apply, Asked, Copy, Done, Drawing, Lay, Moved, Outline, Pull, Summed
from paceline.servers.shelf import Shelf
from paceline.state.hash import weights_sha256
from paceline.state.replica import Replica
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Point, Seat, Served
from paceline.strategies.ps import ParameterServers
from paceline.tensors.peers import Alone
from paceline.tensors.tree import Plan
from paceline.wires.messages import Placed
from paceline.wires.view import View
from tests.servers.shelves import PATIENCE_S, CutLine, World
from tests.servers.test_held import Script, known
from tests.tensors.together import Member, Table

CPU = torch.device("cpu")
LEAVES, STEPS = 6, 10


@pytest.fixture(autouse=True)
def stacks() -> Iterator[None]:
    """Should anything hang."""
    faulthandler.dump_traceback_later(PATIENCE_S - 5)
    yield
    faulthandler.cancel_dump_traceback_later()


class Nobody:
    """Workers stay, here."""

    def check(self, seconds: float, laggard: int) -> None:
        assert seconds < PATIENCE_S / 2, "a worker hangs"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(20, 40), nn.BatchNorm1d(40)
        self.second = nn.Linear(40, 30)
        self.critic = nn.Linear(30, 40)
        generator = torch.Generator().manual_seed(11)  # workers are threads, with one generator for all
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(number))
        return self.second(torch.tanh(self.norm(self.first(x)))).square().mean()

    def criticise(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(number))
        return self.critic(x).tanh().mean()


class Worker:
    """A script with two optimizers and two reduce points a step, which clips, clamps and changes gradients."""

    def __init__(self, strategy: AllReduce, peers: Any) -> None:
        self.strategy, self.peers, self.model = strategy, peers, Net()
        replica = Replica(CPU)
        replica.add_model(self.model)
        trained = [*self.model.first.parameters(), *self.model.norm.parameters(), *self.model.second.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(trained, lr=0.05),
            torch.optim.SGD(self.model.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        replica.optimizers = self.optimizers
        self.weights: list[str] = []
        strategy.attach(replica, peers, True, None)

    def train(self) -> None:
        if isinstance(self.strategy, Served):
            if self.peers.rank == 0:
                self.strategy.lay()
            self.peers.gather(1, b"laid")
            self.strategy.begin()
        for step in range(STEPS):
            self.strategy.begin_step()
            self._reduce(step, 0)
            if step % 3 == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizers[0].step()
            self._reduce(step, 1)
            self.optimizers[1].step()
            if step % 2:
                self.model.critic.weight.data.clamp_(-0.1, 0.1)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.weights.append(weights_sha256(self.model.state_dict()))

    def _reduce(self, step: int, call: int) -> None:
        point, plan = Point(step, call, LEAVES), Plan.of(LEAVES, self.peers.size)
        self.strategy.open(point, plan, flat=False)
        loss = (self.model, self.model.criticise)[call]
        for leaf in plan.leaves_of(self.peers.rank):
            self.strategy.weigh(1.0)
            loss(1000 * step + leaf).backward()
            self.strategy.fold(leaf)
        self.strategy.commit(point, 10 * step + call, [0, 0, 0])


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    worker = Worker(AllReduce(), Alone(CPU))
    worker.train()
    return worker.weights


def seat(rank: int, count: int, slots: int) -> Seat:
    return Seat(rank, slots, list, lambda: None, lambda: View(1, tuple(range(count))), lambda leaf: Tally(2, 1, leaf))


def together(world: World, count: int, strategies: Callable[[], ParameterServers] = ParameterServers) -> list[Worker]:
    table = Table(count)
    table.barrier = threading.Barrier(count, timeout=PATIENCE_S)
    workers: list[Worker] = []
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            strategy = strategies()
            strategy.reach(world, Nobody(), seat(rank, count, slots=6))  # type: ignore[arg-type]
            worker = Worker(strategy, Member(table, rank))
            workers.append(worker)
            worker.train()
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)
            table.barrier.abort()

    world.live([threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)])
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return workers


@pytest.mark.parametrize(
    ("servers", "replicas", "workers"), [(2, 2, 2), (3, 2, 1), (3, 2, 3), (3, 3, 2), (4, 2, 2), (1, 1, 2)]
)
@pytest.mark.parametrize("plan", range(3))
def test_whatever_was_answered_counts_once(
    seed: int, plan: int, servers: int, replicas: int, workers: int, undisturbed: list[str]
) -> None:
    world = World(hash((seed, plan, servers, replicas, workers)), servers, replicas, deaths=4)
    try:
        done = together(world, workers)
        print("\n".join(world.log))
        for worker in done:
            wrong = [step for step, want in enumerate(undisturbed) if worker.weights[step] != want]
            assert not wrong, f"steps that differ: {wrong}"
        world.settle()
        for worker in done:
            worker.strategy.begin()  # pulls from the last primaries
        assert world.fleet.placement is not None
        for fragment, copies in enumerate(world.fleet.placement.copies):
            held = [known(world.shelves[server]._held[fragment]) for server in copies.holders]
            for part in ("version", "values", "states", "sums"):
                said = {str(each[("version", "values", "states", "sums").index(part)]) for each in held}
                assert len(said) == 1, f"the {part} of fragment {fragment} differ at {copies.holders}"
    finally:
        for worker in locals().get("done", []):
            worker.strategy.close()
        world.close()


# two servers, step by step


def placed(number: int, holders: list[int], filled: list[int], since: list[int] | None = None) -> Placed:
    return Placed(number, [holders], [since or [1] * len(holders)], [filled], {0: "0", 1: "1"})


class Slow(CutLine):
    """The answer to one of its calls is held back."""

    holds: Callable[[Any], bool] | None = None

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf, lambda: None)
        self.called = threading.Semaphore(0)
        self.answered, self.let_go = threading.Event(), threading.Event()

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        answer = super().call(message, *body, into=into)
        self.called.release()
        if self.holds is None or not self.holds(message):
            return answer
        late: Future[Reply] = Future()

        def hold(answer: Future[Reply]) -> None:
            self.answered.set()
            self.let_go.wait(PATIENCE_S)
            late.set_result(answer.result())

        answer.add_done_callback(lambda answer: threading.Thread(target=hold, args=(answer,), daemon=True).start())
        return late


class Two:
    """Server 0 is the primary of one fragment, or of two alike, server 1 has a filled copy."""

    def __init__(self, fragments: int = 1) -> None:
        self.script, self.fragments = Script(), fragments
        self.lines: list[CutLine] = []
        self.told: list[tuple[int, dict[int, int]]] = []
        self.between: list[Slow] = []
        """Lines from one server to the other."""
        self.dialled = threading.Semaphore(0)
        self.shelves = [Shelf(k, self._dial_between, lambda *word: self.told.append(word)) for k in range(2)]
        drawing = Drawing([self.script.fragment] * fragments, ["torch.float32"], self.script.carried)
        self.workers = [self._dial(str(k)) for k in range(2)]
        for line in self.workers:
            line.call(Outline(), memoryview(_encoded(drawing))).result(PATIENCE_S)

    def _dial(self, address: str) -> CutLine:
        line = CutLine(self.shelves[int(address)], lambda: None)
        self.lines.append(line)
        return line

    def _dial_between(self, address: str) -> Slow:
        line = Slow(self.shelves[int(address)])
        self.lines.append(line)
        self.between.append(line)
        self.dialled.release()
        return line

    def ask(self, server: int, layout: int, call: Any, body: bytes = b"") -> Any:
        return self.workers[server].call(Asked(layout, call), memoryview(body))

    def both(self, layout: Placed) -> None:
        for shelf in self.shelves:
            shelf.rearrange(layout)

    def lay(self) -> None:
        said, body = self.script.laid()
        assert self.ask(0, 1, said, body).result(PATIENCE_S).message == Done()

    def step(self, count: int) -> tuple[Apply, bytes]:
        return Apply(count, [0]), self.script.update(0, 1, -1)

    def close(self) -> None:
        count = self.fragments
        for shelf in self.shelves:
            shelf.rearrange(Placed(1 << 30, [[-1]] * count, [[1]] * count, [[]] * count, {}))
        for line in self.lines:
            line.close()
        for line in self.lines:
            line.thread.join(PATIENCE_S)


def _encoded(drawing: Drawing) -> bytes:
    return msgspec.msgpack.encode(drawing)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def version(shelf: Shelf) -> int:
    return shelf._held[0].version


def test_a_backup_has_it_before_the_worker_is_answered(two: Two) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    assert two.ask(0, 1, *two.step(1)).result(PATIENCE_S).message == Done()
    assert version(two.shelves[0]) == version(two.shelves[1]) == 1


def test_a_stale_primary_answers_nobody_once_its_backup_was_promoted(two: Two) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    two.shelves[1].rearrange(placed(2, [1], []))
    stale = two.ask(0, 1, *two.step(1))
    assert two.ask(1, 2, *two.step(1)).result(PATIENCE_S).message == Done()
    assert two.ask(1, 2, Pull(1, [0])).result(PATIENCE_S).message == Done()
    assert not stale.done() and version(two.shelves[0]) == 0
    two.shelves[0].rearrange(placed(2, [1], []))
    assert stale.result(PATIENCE_S).message == Moved()


def test_a_line_breaks_between_two_servers_that_live_and_it_is_said_again_over_another(two: Two) -> None:
    """No layout will come of that."""
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    (line,) = two.between
    while line.called.acquire(blocking=False):
        pass
    with two.shelves[1]._held[0].changed:  # what is said waits for that
        step = two.ask(0, 1, *two.step(1))
        assert line.called.acquire(timeout=PATIENCE_S)
        line.close()
    assert step.result(PATIENCE_S).message == Done()
    assert version(two.shelves[0]) == version(two.shelves[1]) == 1


def test_what_is_refused_of_one_fragment_breaks_off_nothing_that_is_said_of_another() -> None:
    """Server 1 is told first that it leads fragment 0 from now on, and refuses what server 0 says of it. Server 0 comes to that
    when it knows the new layout already, and by that has something to say of fragment 1, which no further one will help."""
    two = Two(fragments=2)
    try:
        before, after = (
            Placed(number, [first, [0, 1]], [[1, 1]] * 2, [[0, 1]] * 2, {0: "0", 1: "1"})
            for number, first in ((1, [0, 1]), (2, [1, 0]))
        )
        two.both(before)
        said, body = two.script.laid()
        for k in (0, 1):
            assert (
                two.ask(0, 1, msgspec.structs.replace(said, fragments=[k]), body).result(PATIENCE_S).message == Done()
            )
        (line,) = two.between
        line.holds = lambda message: message.said.fragments == [0]
        two.shelves[1].rearrange(after)
        refused = two.ask(0, 1, *two.step(1))
        assert line.answered.wait(PATIENCE_S)
        two.shelves[0].rearrange(after)
        while line.called.acquire(blocking=False):
            pass
        another = two._dial("0")
        with two.shelves[1]._held[1].changed:
            apply, update = two.step(1)
            step = another.call(Asked(2, msgspec.structs.replace(apply, fragments=[1])), memoryview(update))
            assert line.called.acquire(timeout=PATIENCE_S)
            line.let_go.set()
            assert refused.result(PATIENCE_S).message == Moved()
            assert two.shelves[0]._lines == {1: line}
        assert step.result(PATIENCE_S).message == Done()
        assert [shelf._held[1].version for shelf in two.shelves] == [1, 1]
    finally:
        two.close()


def test_a_fill_goes_on_over_another_line_when_one_breaks(two: Two) -> None:
    two.both(placed(1, [0], []))
    two.lay()
    two.both(placed(2, [0, 1], [], since=[1, 2]))
    there = two.shelves[1]._made(0)
    filling = threading.Thread(target=two.shelves[0].fill, args=(1,), daemon=True)
    with there.changed:
        filling.start()
        assert two.dialled.acquire(timeout=PATIENCE_S)
        assert two.between[0].called.acquire(timeout=PATIENCE_S), "it is introduced"
        assert two.between[0].called.acquire(timeout=PATIENCE_S), "it is filled"
        two.between[0].close()
    filling.join(PATIENCE_S)
    assert two.told == [(1, {0: 2})]
    assert known(two.shelves[0]._held[0]) == known(two.shelves[1]._held[0])


def test_a_pull_that_waits_at_a_primary_is_told_that_it_has_moved(two: Two) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    waiting = two.ask(0, 1, Pull(7, [0]))
    two.both(placed(2, [1, 0], [0]))
    assert waiting.result(PATIENCE_S).message == Moved()
    assert two.ask(0, 1, Pull(0, [0])).result(PATIENCE_S).message == Moved()


def test_whoever_knows_a_newer_layout_is_answered_when_the_server_does(two: Two) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    early = two.ask(1, 3, Pull(0, [0]))
    two.shelves[1].rearrange(placed(2, [0, 1], [1]))
    assert not early.done()
    two.shelves[1].rearrange(placed(3, [1, 0], [0]))
    assert early.result(PATIENCE_S).message == Done()


def test_a_backup_that_was_dropped_and_added_again_begins_anew(two: Two) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    two.ask(0, 1, *two.step(1)).result(PATIENCE_S)
    two.both(placed(2, [0], []))
    two.both(placed(3, [0, 1], [], since=[1, 3]))
    assert 0 not in two.shelves[1]._held, "what it had is worth nothing"
    assert two.shelves[0].fill(2) == 3 and two.told == [(1, {0: 3})]
    assert known(two.shelves[0]._held[0]) == known(two.shelves[1]._held[0])
    old = Copy(3, 0, [1], Summed(1, 0, 5, [0]))
    body = memoryview(bytes(4 * two.script.fragment.stop))
    assert two.workers[1].call(old, body).result(PATIENCE_S).message == Moved(), "said of the copy that it had before"


def test_what_a_lost_primary_told_one_copy_only_is_told_the_others_by_the_next_one(two: Two) -> None:
    """It comes again from the worker, which was not answered. The new primary knows it; another copy need not."""
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    said, body = two.step(1)
    assert two.workers[1].call(Copy(1, 0, [1], said), memoryview(body)).result(PATIENCE_S).message == Done()
    two.both(placed(2, [1, 0], [0]))
    assert two.ask(1, 2, said, body).result(PATIENCE_S).message == Done()
    assert version(two.shelves[1]) == version(two.shelves[0]) == 1


def test_a_server_that_no_worker_has_spoken_to_fills_once_it_knows_what_is_trained(two: Two) -> None:
    """It was made primary before anything was laid."""
    first, other = Shelf(0, two._dial_between, lambda *word: two.told.append(word)), placed(1, [0, 1], [], since=[1, 1])
    filling = threading.Thread(target=first.fill, args=(0,), daemon=True)
    filling.start()
    first.rearrange(other)
    two.shelves[1].rearrange(other)
    drawing = Drawing([two.script.fragment], ["torch.float32"], two.script.carried)
    first.handle(Outline(), memoryview(_encoded(drawing)))
    filling.join(PATIENCE_S)
    assert not filling.is_alive() and two.told == [(1, {0: 1})]


def test_a_fill_goes_on_with_what_is_said_meanwhile(two: Two) -> None:
    two.both(placed(1, [0], []))
    two.lay()
    two.both(placed(2, [0, 1], [], since=[1, 2]))
    two.shelves[0].fill(1)
    two.ask(0, 2, *two.step(1)).result(PATIENCE_S)
    assert version(two.shelves[1]) == 1, "it is told, though no layout has it filled yet"


@pytest.mark.parametrize(
    ("call", "body", "says"),
    [
        (Lay([5], 0), b"", "there is no fragment 5|Moved"),
        (Pull(0, [-1]), b"", "there is no fragment -1|Moved"),
        (Summed(1, 0, 5, [0]), b"abc", ""),
    ],
    ids=["no such fragment", "a negative one", "not a worker's to say"],
)
def test_what_makes_no_sense_is_refused_and_the_server_lives_on(two: Two, call: Any, body: bytes, says: str) -> None:
    two.both(placed(1, [0, 1], [1]))
    two.lay()
    future = two.ask(0, 1, call, body)
    error = future.exception(PATIENCE_S)
    assert isinstance(error, ValueError) if error is not None else future.result().message == Moved()
    assert two.ask(0, 1, *two.step(1)).result(PATIENCE_S).message == Done()
