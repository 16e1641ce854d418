"""Codecs at servers: the bits of all-reduce with the same codec, whichever server dies; few bytes on a real connection; and
at one's own pace every push with what it leaves out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from paceline import strategies
from paceline.servers.direct import OwnServer
from paceline.servers.lines import Server, line_to
from paceline.servers.messages import Call
from paceline.servers.register import Delivered
from paceline.servers.serving import Answer, Serving
from paceline.servers.shelf import Shelf
from paceline.state.replica import Replica
from paceline.strategies.base import Point
from paceline.strategies.coded_free import CodedFree
from paceline.tensors.codecs import parse
from paceline.tensors.peers import Alone
from paceline.tensors.tree import Plan
from paceline.wires import wire
from tests.cluster.visitors import SECRET
from tests.servers.shelves import World
from tests.servers.test_shelf import CPU, Nobody, Worker, seat, stacks, together

__all__ = ["stacks"]
CODECS = ["bf16", "int8", "topk:0.05", "randomk:0.2", "powersgd:1", "onebit"]


PLACES = [
    *((codec, 2, 2) for codec in CODECS),
    *(("int8", 1, workers) for workers in (1, 4)),
    *(("powersgd:1", 2, workers) for workers in (1, 4)),
    ("topk:0.05", 3, 3),
]
"""Codec, servers, workers."""


@pytest.fixture(scope="module")
def by_allreduce() -> Callable[[str], list[str]]:
    """What one worker comes to without servers, after each step."""

    @cache
    def weights(codec: str) -> list[str]:
        worker = Worker(strategies.create(f"allreduce+{codec}"), Alone(CPU))  # type: ignore[arg-type]
        worker.train()
        return worker.weights

    return weights


@pytest.mark.parametrize(("codec", "servers", "workers"), PLACES)
def test_the_bits_of_allreduce_with_the_same_codec_whichever_servers_die(
    seed: int, codec: str, servers: int, workers: int, by_allreduce: Callable[[str], list[str]]
) -> None:
    world = World(hash((seed, codec, servers, workers)), servers, min(servers, 2), deaths=3)
    try:
        done = together(world, workers, lambda: strategies.create(f"ps+{codec}"))  # type: ignore[arg-type,return-value]
        print("\n".join(world.log))
        for worker in done:
            assert worker.weights == by_allreduce(codec)
    finally:
        for worker in locals().get("done", []):
            worker.strategy.close()
        world.close()


# bytes


class Wired(OwnServer):
    """A server that is reached over TCP, and counts what comes."""

    def __init__(self) -> None:
        shelf, sock = Shelf(), wire.listen_tcp()
        super().__init__(shelf)
        self.received, self._lock = 0, threading.Lock()
        self._address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"

        def handle(caller: Any, message: Any, body: memoryview) -> Answer:
            return Answer(*shelf.handle(message, body))

        self._serving = Serving([sock], SECRET, Call, handle, meter=self._count)

    def _count(self, received: int, sent: int) -> None:
        with self._lock:
            self.received += received

    def dial(self, address: str) -> Server:
        return Server(*(line_to(self._address, SECRET, "worker 0") for _ in range(2)))

    def close(self) -> None:
        self._serving.close()


@pytest.fixture
def wired() -> Iterator[Wired]:
    found = Wired()
    yield found
    found.close()


LEAVES, STEPS = 3, 4
WIDE = [(512, 300), (512,)]


def wide() -> tuple[Replica, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(300, 512)
    replica = Replica(CPU)
    replica.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica.optimizers = [optimizer]
    return replica, model, optimizer


@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "onebit", "powersgd:2"])
def test_what_crosses_a_connection_is_the_message(codec: str, wired: Wired) -> None:
    strategy: Any = strategies.create(f"ps+{codec}")
    strategy.reach(wired, Nobody(), seat(0, 1, LEAVES))
    replica, model, optimizer = wide()
    strategy.attach(replica, Alone(CPU), True, None)
    strategy.lay()
    strategy.begin()
    before = wired.received
    for step in range(STEPS):
        strategy.begin_step()
        strategy.open(Point(step, 0, LEAVES), Plan.of(LEAVES, 1), flat=False)
        for leaf in range(LEAVES):
            strategy.weigh(1.0)
            model(torch.randn(4, 300, generator=torch.Generator().manual_seed(leaf))).square().mean().backward()
            strategy.fold(leaf)
        strategy.commit(Point(step, 0, LEAVES), step, [0, 0, 0])
        optimizer.step()
        optimizer.zero_grad()
    received = wired.received - before
    strategy.close()
    told = strategy._reducer.sent_bytes
    assert strategy.report()["compression"] == round(
        told / (STEPS * 4 * sum(map(torch.Size.numel, map(torch.Size, WIDE)))), 5
    )
    assert told <= received <= 1.05 * told + 4000 * STEPS, "what is told is what has come, with heads"
    assert told <= 1.05 * LEAVES * STEPS * parse(codec).nbytes(WIDE)


# at one's own pace


def push(strategy: CodedFree, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """One micro-batch; its gradient."""
    turned = strategy.turn(1, [])
    strategy.take(turned.numbers[0], 1.0, turned.count)
    x = torch.randint(-3, 4, (4, 300), generator=torch.Generator().manual_seed(number)).float()
    model(x).sum().backward()
    gradient = torch.cat([param.grad.reshape(-1).clone() for param in model.parameters() if param.grad is not None])
    optimizer.step()
    optimizer.zero_grad()
    strategy.turn(1, [Delivered(turned.numbers[0], 4, 4, 0)])
    return gradient


def test_what_was_pushed_and_what_is_kept_are_what_was_given(wired: Wired) -> None:
    """Whole numbers and a rate of 1: exact. Over a real connection, with few bytes."""
    strategy = CodedFree("async+topk:0.02")
    strategy.reach(wired, Nobody(), seat(0, 1, 2))
    replica, model, optimizer = wide()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer.param_groups[0]["lr"] = 1.0
    strategy.attach(replica, Alone(CPU), False, None)
    strategy.lay()
    strategy.begin()
    strategy.begin_stretch(40, 0, 0, lambda: bytearray(8))
    before, given = wired.received, torch.zeros(512 * 301)
    for number in range(20):
        given += push(strategy, model, optimizer, number)
    received = wired.received - before
    with strategy.whole():
        (kept,) = strategy.capture()["kept"]
    strategy.pull(20)
    pushed = -torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    assert bool(pushed.any()) and bool(kept.any()) and torch.equal(pushed + kept, given)
    told = strategy.report()["compression"] * 20 * 4 * 512 * 301
    assert told <= received <= 1.1 * told + 20 * 3000
    assert told <= 20 * 1.05 * parse("topk:0.02").nbytes(WIDE)
    strategy.close()
