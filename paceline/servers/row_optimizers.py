"""Optimizers of a table's rows. A row moves only in the updates that touch it.

Every operation is one correctly rounded sum, product, quotient or root. So a row's bits depend on its own gradients
alone: not on which rows come with it, on how many at a time, or on how wide the processor's registers are. torch's
own kernels fuse products and sums in part of a tensor, and would differ in the last bit.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.float32]
Counts = NDArray[np.int32]


class _Rule(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`weight_decay` is added to the gradient, as torch's is, in the updates that touch a row."""

    states: ClassVar[tuple[str, ...]] = ()
    """What is kept for each element."""
    counts: ClassVar[bool] = False
    """Whether a row's updates are counted."""

    lr: float
    weight_decay: float = 0.0

    def begin(self, name: str) -> float:
        """What a new row's state is filled with."""
        return 0.0


class SGD(_Rule, frozen=True, tag=True):
    def apply(self, value: Block, states: list[Block], count: Counts, gradient: Block, spare: list[Block]) -> None:
        value -= np.multiply(gradient, self.lr, out=spare[0])


class Momentum(_Rule, frozen=True, tag=True, kw_only=True):
    """SGD with momentum. A row's momentum rests while no update touches the row."""

    states: ClassVar = ("momentum",)

    momentum: float
    nesterov: bool = False

    def apply(self, value: Block, states: list[Block], count: Counts, gradient: Block, spare: list[Block]) -> None:
        (momentum,), move = states, spare[0]
        momentum *= self.momentum
        momentum += gradient
        if self.nesterov:
            np.multiply(momentum, self.momentum, out=move)
            move += gradient
            move *= self.lr
        else:
            np.multiply(momentum, self.lr, out=move)
        value -= move


class Adagrad(_Rule, frozen=True, tag=True, kw_only=True):
    states: ClassVar = ("sum",)

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def begin(self, name: str) -> float:
        return self.initial_accumulator_value

    def apply(self, value: Block, states: list[Block], count: Counts, gradient: Block, spare: list[Block]) -> None:
        (total,), move = states, spare[0]
        total += np.multiply(gradient, gradient, out=move)
        np.sqrt(total, out=move)
        move += self.eps
        np.divide(gradient, move, out=move)
        move *= self.lr
        value -= move


class Adam(_Rule, frozen=True, tag=True, kw_only=True):
    """Bias is corrected by the number of updates of the row itself."""

    states: ClassVar = ("exp_avg", "exp_avg_sq")
    counts: ClassVar = True

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def apply(self, value: Block, states: list[Block], count: Counts, gradient: Block, spare: list[Block]) -> None:
        (mean, square), (move, divisor) = states, spare[:2]
        first, second = self.betas
        mean *= first
        mean += np.multiply(gradient, 1 - first, out=move)
        square *= second
        np.multiply(gradient, gradient, out=move)
        move *= 1 - second
        square += move
        times = count.astype(np.float64)[:, None]
        np.sqrt(square, out=divisor)
        divisor /= np.sqrt(1 - second**times).astype(np.float32)
        divisor += self.eps
        np.multiply(mean, (self.lr / (1 - first**times)).astype(np.float32), out=move)
        move /= divisor
        value -= move


RowOptimizer = SGD | Momentum | Adagrad | Adam
SPARE = 3
"""How many blocks of scratch memory `step` needs."""


def step(
    optimizer: RowOptimizer,
    value: Block,
    states: list[Block],
    count: Counts,
    gradient: Block,
    spare: list[Block],
) -> None:
    """Change rows and their state in place; `count` has this update in it."""
    own, *more = spare
    if optimizer.weight_decay:
        np.multiply(value, optimizer.weight_decay, out=own)
        gradient = np.add(own, gradient, out=own)
    optimizer.apply(value, states, count, gradient, more)
