"""A share that is computed in pieces by a worker that meets nobody in a step: their gradients add up here."""

from __future__ import annotations

import torch

from paceline.state.replica import Replica


class Pieces:
    def __init__(self, replica: Replica, mean: bool) -> None:
        self._replica, self._mean = replica, mean
        self._weight, self._folded = 1.0, 0.0
        self._sums: dict[int, torch.Tensor] = {}

    def weigh(self, weight: float) -> None:
        """What the piece in hand counts for. A share in one piece is taken as it is."""
        self._weight = weight if self._mean else 1.0

    def fold(self) -> None:
        """A piece is done."""
        self._folded += self._weight
        with torch.no_grad():
            for index, param in enumerate(self._replica.params):
                if param.grad is not None:
                    part = param.grad * self._weight
                    self._sums[index] = self._sums[index] + part if index in self._sums else part
                    param.grad = None

    def join(self) -> None:
        """All are done: `.grad` is their weighted mean, or their sum."""
        for index, total in self._sums.items():
            self._replica.params[index].grad = total / self._folded if self._mean else total
        self._sums, self._folded = {}, 0.0
