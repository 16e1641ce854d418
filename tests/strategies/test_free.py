"""Workers at their own pace whose servers change places: what was counted comes to all of them, whoever was to say it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from paceline.data.receipts import OWN_DRAWS, Tally
from paceline.servers.calling import Reply
from paceline.servers.lines import Server
from paceline.servers.register import Delivered
from paceline.servers.shelf import Shelf
from paceline.state.replica import Replica
from paceline.strategies.base import Seat
from paceline.strategies.free import FreeRunning
from paceline.tensors.peers import Alone
from paceline.wires.messages import Placed
from paceline.wires.view import View
from tests.servers.shelves import PATIENCE_S, CutLine, World

CPU = torch.device("cpu")
SLOTS = 2


class Worker:
    """Each of its pushes takes a number off all weights: the order does not matter, that it counts once does."""

    def __init__(self, number: int, directory: Any, forgets: Callable[[], bool] = lambda: False) -> None:
        self.model = nn.Linear(30, 20, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.zero_()
        self._until = time.monotonic() + PATIENCE_S
        self.lost: list[int] = []
        self.strategy = _Forgetful("ssp:2", forgets)
        view = View(1, (0, 1))
        self.strategy.reach(
            directory,
            self,  # type: ignore[arg-type]
            Seat(number, SLOTS, lambda: self.lost, self._check, lambda: view, lambda leaf: Tally(1, 1, leaf)),
        )
        replica = Replica(CPU)
        replica.add_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        replica.optimizers = [self.optimizer]
        self.strategy.attach(replica, Alone(CPU), False, None)

    def _check(self) -> None:
        assert time.monotonic() < self._until, "it waits for ever"

    def begin(self, total: int) -> None:
        self.strategy.begin()
        self.strategy.begin_stretch(total, 0, OWN_DRAWS, lambda: bytearray(b"notes"))

    def push(self, number: int, count: int) -> None:
        self.strategy.take(number, 1.0, count)
        self.model.weight.grad = torch.full_like(self.model.weight, number + 1)
        self.optimizer.step()

    def train(self, total: int) -> None:
        self.begin(total)
        delivered: list[Delivered] = []
        while (turned := self.strategy.turn(1, delivered)).numbers:
            self.push(turned.numbers[0], turned.count)
            delivered = [Delivered(turned.numbers[0], 1, 1, 0)]
        self.strategy.end_stretch(turned)


class _Forgetful(FreeRunning):
    """Of some pushes that were counted it tells no server, as one that is killed there."""

    def __init__(self, mode: str, forgets: Callable[[], bool]) -> None:
        super().__init__(mode)
        self._forgets, self._pushes = forgets, False

    def _push(self, number: int, optimizer: Any) -> None:
        self._pushes = True
        super()._push(number, optimizer)
        self._pushes = False

    def _apply(self, count: int, update: memoryview) -> list[Future[Reply]]:
        return [] if self._pushes and self._forgets() else super()._apply(count, update)


class Two:
    """Two servers, and the directory of each worker. Server 0 leads, and 1 has a copy of all, until `give_away`."""

    def __init__(self) -> None:
        self.lines: list[CutLine] = []
        self.shelves = [Shelf(k, self._line) for k in range(2)]
        self.count, self.number, self.first_led_by_1 = 0, 1, 0

    def _line(self, address: str) -> CutLine:
        self.lines.append(CutLine(self.shelves[int(address)], lambda: None))
        return self.lines[-1]

    def size(self, nbytes: list[int]) -> None:
        self.count = self.first_led_by_1 = len(nbytes)
        for shelf in self.shelves:
            shelf.rearrange(self._layout())

    def layout(self, after: int) -> Placed:
        assert after < self.number, "no further one will come"
        return self._layout()

    def _layout(self) -> Placed:
        register = self.count - 1
        holders = [[1, 0] if self.first_led_by_1 <= k < register else [0, 1] for k in range(self.count)]
        return Placed(
            self.number, holders, [[1, 1]] * self.count, [[0, 1]] * self.count, {0: "0", 1: "1"},
            {"parameters": (0, self.count)},
        )  # fmt: skip

    def give_away(self, first: int) -> None:
        """From this fragment on all are led by server 1; not the register."""
        self.number, self.first_led_by_1 = self.number + 1, first
        for shelf in self.shelves:
            shelf.rearrange(self._layout())

    def dial(self, address: str) -> Server:
        return Server(self._line(address), self._line(address))

    def close(self) -> None:
        for shelf in self.shelves:
            shelf.rearrange(Placed(1 << 30, [[-1]] * self.count, [[1]] * self.count, [[]] * self.count, {}))
        for line in self.lines:
            line.close()
        for line in self.lines:
            line.thread.join(PATIENCE_S)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_a_push_whose_worker_is_dead_comes_to_servers_that_have_changed_places(two: Two) -> None:
    """Who pulls tells them of it by an old layout; a server refuses that for a fragment that it leads no more, while the pull
    waits for one that it leads."""
    dead, alive = Worker(0, two, lambda: True), Worker(1, two)
    try:
        dead.strategy.lay()
        for worker in (dead, alive):
            worker.begin(total=4)
        dead.push(*dead.strategy.turn(1, []).numbers, 0)
        turned = alive.strategy.turn(1, [])
        assert turned.count == 1
        two.give_away(first=1)
        alive.strategy.take(*turned.numbers, 1.0, turned.count)
        assert bool((alive.model.weight == -1).all())
    finally:
        for worker in (dead, alive):
            worker.strategy.close()


def test_what_a_dead_worker_had_in_hand_comes_next_though_nobody_has_waited(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its step stays open to the stretch's end: no checkpoint is due, and who looks on sees nothing move."""
    dead, alive = Worker(0, two), Worker(1, two)
    try:
        dead.strategy.lay()
        for worker in (dead, alive):
            worker.begin(total=8)
        assert dead.strategy.turn(1, []).numbers == [0]
        (second,) = alive.strategy.turn(1, []).numbers
        alive.lost = [0]
        turned = alive.strategy.turn(1, [Delivered(second, 1, 1, 0)])
        assert turned.numbers == [0] and turned.gone == [0]
        asked, ask = [], alive.strategy._ask
        monkeypatch.setattr(
            alive.strategy, "_ask", lambda message: (asked.append(type(message).__name__), ask(message))[1]
        )
        alive.strategy.turn(1, [])
        assert asked == ["Turn"], "it is told once"
    finally:
        for worker in (dead, alive):
            worker.strategy.close()


@pytest.mark.parametrize(
    ("seconds", "lost", "tells"), [(0.06, [], False), (0.06, [0], True), (0.06, [1], False), (0.3, [], True)]
)
def test_of_whose_push_servers_are_told_again(
    seconds: float, lost: list[int], tells: bool, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dead worker's at once. Of one's that may only be slow, as the servers may be, after a while: each worker that waits
    would tell them, and make them slower."""
    silent, waiting = Worker(0, two, lambda: True), Worker(1, two)
    try:
        silent.strategy.lay()
        silent.begin(4)
        waiting.begin(4)
        turned = silent.strategy.turn(1, [])
        silent.push(turned.numbers[0], turned.count)
        told: list[int] = []

        def tell(count: int, update: memoryview) -> list[Future[Reply]]:
            told.append(count)
            return []

        monkeypatch.setattr(waiting.strategy, "_apply", tell)
        waiting.lost = lost
        waiting.strategy._while_pulling()(seconds)
        assert told == [1] * tells
    finally:
        silent.strategy.close()
        waiting.strategy.close()


@pytest.mark.parametrize("plan", range(4))
def test_every_push_counts_once_whichever_servers_are_lost_and_however_late_they_hear_of_it(
    seed: int, plan: int
) -> None:
    dice = random.Random(hash((seed, plan)))
    world, total = World(dice.randrange(1 << 30), servers=2 + plan % 2, replicas=2, deaths=4), 60
    errors: list[BaseException] = []
    workers: list[Worker] = []
    laid = threading.Event()

    def work(number: int) -> None:
        try:
            worker = Worker(number, world, lambda: dice.random() < 0.3)
            workers.append(worker)
            if number == 0:
                worker.strategy.lay()
                laid.set()
            assert laid.wait(PATIENCE_S)
            worker.train(total)
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)

    try:
        world.live([threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)])
        print("\n".join(world.log))
        for error in errors:
            raise error
        for worker in workers:
            assert bool((worker.model.weight == -sum(range(1, total + 1))).all()), worker.model.weight
    finally:
        for worker in workers:
            worker.strategy.close()
        world.close()
