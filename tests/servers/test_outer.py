"""Outer optimizers against torch's own, and against themselves cut to pieces."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.servers.outer import OUTERS, SGD, Adagrad, Adam, Nesterov, Outer, State, Yogi, make

Given = list[list[float]]
numbers = st.floats(-4, 4, width=32)
rounds = st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=8)
REFERENCES = [
    (SGD(lr=0.5), partial(torch.optim.SGD, lr=0.5)),
    (SGD(lr=0.5, momentum=0.8), partial(torch.optim.SGD, lr=0.5, momentum=0.8)),
    (Nesterov(), partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)),
    (Adagrad(), partial(torch.optim.Adagrad, lr=0.01, eps=1e-3)),
    (Adam(), partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.99), eps=1e-3)),
]


def after(outer: Outer, deltas: torch.Tensor) -> tuple[torch.Tensor, State]:
    theta = torch.linspace(-1, 1, deltas.shape[1], dtype=deltas.dtype)
    state = outer.begin(theta)
    for count, delta in enumerate(deltas, 1):
        outer.step(theta, delta, state, count)
    return theta, state


@pytest.mark.parametrize(("outer", "reference"), REFERENCES, ids=lambda each: getattr(each, "lr", ""))
@given(deltas=rounds)
@settings(max_examples=50, deadline=None)
def test_as_torch_does_it(outer: Outer, reference: partial[torch.optim.Optimizer], deltas: Given) -> None:
    given_deltas = torch.tensor(deltas, dtype=torch.float64)
    param = torch.linspace(-1, 1, 5, dtype=torch.float64)
    optimizer = reference([param])
    for delta in given_deltas:
        param.grad = delta
        optimizer.step()
    torch.testing.assert_close(after(outer, given_deltas)[0], param, rtol=1e-12, atol=1e-12)


@given(deltas=rounds)
@settings(max_examples=50, deadline=None)
def test_yogi_is_adam_with_another_v(deltas: Given) -> None:
    """Nobody else's to compare with: its equations, one element at a time."""
    theta, m, v = [-1.0, -0.5, 0.0, 0.5, 1.0], [0.0] * 5, [0.0] * 5
    for count, delta in enumerate(deltas, 1):
        for k, d in enumerate(delta):
            m[k] = 0.9 * m[k] + 0.1 * d
            v[k] -= 0.01 * d * d * ((v[k] > d * d) - (v[k] < d * d))
            theta[k] -= 0.01 * (m[k] / (1 - 0.9**count)) / ((v[k] / (1 - 0.99**count)) ** 0.5 + 1e-3)
    found = after(Yogi(), torch.tensor(deltas, dtype=torch.float64))[0]
    torch.testing.assert_close(found, torch.tensor(theta, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OUTERS)
@given(seed=st.integers(0, 1 << 30), cut=st.integers(0, 70))
@settings(max_examples=30, deadline=None)
def test_where_it_is_cut_does_not_change_a_bit(name: str, seed: int, cut: int) -> None:
    deltas = torch.randn(4, 70, generator=torch.Generator().manual_seed(seed))
    outer, theta = make(name), torch.linspace(-1, 1, 70)
    parts = [(theta[:cut].clone(), deltas[:, :cut]), (theta[cut:].clone(), deltas[:, cut:])]
    for part, mine in parts:
        state = outer.begin(part)
        for count, delta in enumerate(mine, 1):
            outer.step(part, delta, state, count)
    assert torch.equal(torch.cat([part for part, _ in parts]), after(outer, deltas)[0])


def test_plain_averaging_is_sgd_as_it_comes() -> None:
    theta, mine = torch.tensor([1.0, 2.0]), torch.tensor([[0.5, 1.0], [0.25, 4.0]])
    make("sgd").step(theta, (theta - mine).mean(0), make("sgd").begin(theta), 1)
    assert torch.equal(theta, mine.mean(0))


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("lamb", {}, "no outer optimizer 'lamb'"),
        ("sgd", {"beta1": 0.5}, "no beta1; it has lr, momentum"),
        ("adam", {"beta1": 1.0}, "beta1 must be at least 0 and below 1"),
        ("adam", {"lr": float("nan")}, "lr must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, values: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(name, **values)
