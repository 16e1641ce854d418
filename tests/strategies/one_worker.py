"""Drives a strategy through reduce points as the stepper would, without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import strategies
from paceline.state.replica import Replica
from paceline.strategies.base import Point
from paceline.tensors.peers import Alone, Peers
from paceline.tensors.tree import Plan

CPU = torch.device("cpu")


class Driver:
    """A worker with its models; `step` takes one reduce point over so many leaves."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        peers: Peers | None = None,
        mean: bool = True,
        scaled: Any = None,
        strategy: str = "allreduce",
    ):
        self.peers = peers if peers is not None else Alone(CPU)
        self.replica = Replica(CPU)
        for model in models:
            self.replica.add_model(model)
        self.strategy = strategies.create(strategy)
        self.strategy.attach(self.replica, self.peers, mean, scaled)
        self.number = 0

    def step(
        self,
        leaves: int,
        backward: Callable[[int], None],
        weights: Sequence[float] | None = None,
        call: int = 0,
        clear: bool = True,
    ) -> None:
        if clear:
            for param in self.replica.params:
                param.grad = None
        if call == 0:
            self.strategy.begin_step()
        point = Point(self.number, call, leaves)
        plan = Plan.of(leaves, self.peers.size)
        self.strategy.open(point, plan, flat=False)
        for leaf in plan.leaves_of(self.peers.rank):
            weight = weights[leaf] if weights else 1.0
            self.strategy.weigh(weight)
            if weight:
                backward(leaf)
            self.strategy.fold(leaf)
        self.strategy.commit(point, self.number * 10 + call, [0, 0, 0])
        self.number += 1

    def grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.replica.params]

    def close(self) -> None:
        self.strategy.close()
