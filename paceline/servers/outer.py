"""Outer optimizers: what becomes of θ when those who have trained from it come back. Pure.

A round gives Δ = mean(θ − θᵢ), which points uphill as a gradient does; an outer optimizer takes it for one:

    sgd        m ← βm + Δ      θ ← θ − ηm                  with η = 1, β = 0 this is plain averaging
    nesterov   m ← βm + Δ      θ ← θ − η(Δ + βm)           DiLoCo's
    adagrad    v ← v + Δ²      θ ← θ − ηm / (√v + ε)       in these three m ← β₁m + (1 − β₁)Δ
    adam       v ← β₂v + (1 − β₂)Δ²                        both divided by 1 − βᵗ before they are used, as torch does
    yogi       v ← v − (1 − β₂) sign(v − Δ²) Δ²            the same

Every operation is one correctly rounded sum, product, quotient or root, element by element. So a result's bits do not depend
on how the tensors are cut, or on how wide the processor's registers are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeAlias

import msgspec

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch

State: TypeAlias = "dict[str, torch.Tensor]"
"""By name, each of θ's shape and dtype."""


class Outer(msgspec.Struct, frozen=True, tag=True):
    """Its values; what it remembers from step to step is outside, in a `State`.

    >>> import torch
    >>> theta, delta = torch.tensor([1.0]), torch.tensor([0.5])
    >>> state = Nesterov().begin(theta)
    >>> Nesterov().step(theta, delta, state, count=1)
    >>> theta, state  # 1 − 0.7 (0.5 + 0.9 · 0.5)
    (tensor([0.3350]), {'m': tensor([0.5000])})
    """

    states: ClassVar[tuple[str, ...]] = ()
    """What is remembered for each element."""

    lr: float = 1.0

    def begin(self, theta: torch.Tensor) -> State:
        """Before the first step."""
        return {name: theta.new_zeros(theta.shape) for name in self.states}

    def step(self, theta: torch.Tensor, delta: torch.Tensor, state: State, count: int) -> None:
        """Change θ and the state in place; `count` has this step in it."""
        theta -= self._move(delta, state, count) * self.lr

    def _move(self, delta: torch.Tensor, state: State, count: int) -> torch.Tensor:
        raise NotImplementedError


class SGD(Outer, frozen=True, tag="sgd"):
    states: ClassVar = ("m",)

    momentum: float = 0.0

    def _move(self, delta: torch.Tensor, state: State, count: int) -> torch.Tensor:
        return _moved(state["m"], self.momentum, delta)


class Nesterov(Outer, frozen=True, tag="nesterov"):
    states: ClassVar = ("m",)

    lr: float = 0.7
    momentum: float = 0.9

    def _move(self, delta: torch.Tensor, state: State, count: int) -> torch.Tensor:
        return delta + _moved(state["m"], self.momentum, delta) * self.momentum


class Adagrad(Outer, frozen=True, tag="adagrad"):
    states: ClassVar = ("m", "v")

    lr: float = 0.01
    beta1: float = 0.0
    eps: float = 1e-3

    def _move(self, delta: torch.Tensor, state: State, count: int) -> torch.Tensor:
        mean = _moved(state["m"], self.beta1, delta * (1 - self.beta1))
        state["v"] += delta * delta
        return mean / (state["v"].sqrt() + self.eps)


class Adam(Outer, frozen=True, tag="adam"):
    states: ClassVar = ("m", "v")

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def _move(self, delta: torch.Tensor, state: State, count: int) -> torch.Tensor:
        mean = _moved(state["m"], self.beta1, delta * (1 - self.beta1))
        self._spread(state["v"], delta * delta)
        square = state["v"] / (1 - self.beta2**count)
        return mean / (1 - self.beta1**count) / (square.sqrt() + self.eps)

    def _spread(self, v: torch.Tensor, squared: torch.Tensor) -> None:
        _moved(v, self.beta2, squared * (1 - self.beta2))


class Yogi(Adam, frozen=True, tag="yogi"):
    """As Adam, but v goes towards Δ² by steps that do not grow with their distance: one large Δ is forgotten slowly."""

    def _spread(self, v: torch.Tensor, squared: torch.Tensor) -> None:
        v -= (v - squared).sign() * squared * (1 - self.beta2)


def _moved(tensor: torch.Tensor, factor: float, by: torch.Tensor) -> torch.Tensor:
    """In place."""
    tensor *= factor
    tensor += by
    return tensor


AnyOuter = SGD | Nesterov | Adagrad | Adam | Yogi
OUTERS: dict[str, type[AnyOuter]] = {
    "sgd": SGD,
    "nesterov": Nesterov,
    "adagrad": Adagrad,
    "adam": Adam,
    "yogi": Yogi,
}


def make(name: str, **values: float) -> AnyOuter:
    """The outer optimizer of a name, with these values instead of its own.

    >>> make("nesterov", momentum=0.5)
    Nesterov(lr=0.7, momentum=0.5)
    >>> make("adam", momentum=0.5)
    Traceback (most recent call last):
    paceline.errors.UsageError: the outer optimizer adam has no momentum; it has lr, beta1, beta2, eps
    """
    if name not in OUTERS:
        raise UsageError(f"there is no outer optimizer {name!r}; there are: {', '.join(OUTERS)}")
    kind = OUTERS[name]
    for given, value in values.items():
        if given not in kind.__struct_fields__:
            raise UsageError(f"the outer optimizer {name} has no {given}; it has {', '.join(kind.__struct_fields__)}")
        _check(name, given, value)
    return kind(**values)


def _check(name: str, given: str, value: float) -> None:
    if given in ("lr", "eps"):
        if not 0 < value < float("inf"):
            raise UsageError(f"the outer optimizer {name}: {given} must be above 0, and is {value}")
    elif not 0 <= value < 1:
        raise UsageError(f"the outer optimizer {name}: {given} must be at least 0 and below 1, and is {value}")
