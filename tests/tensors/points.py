"""Reduce points for tests: any shares, at any weights, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from paceline.tensors.peers import Peers
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import reduced, tree_weight

Grads = list[torch.Tensor | None]


def reduce(
    peers: Peers,
    tensors: Sequence[torch.Tensor],
    count: int,
    shares: Sequence[Grads],
    weights: Sequence[float] | None = None,
    mean: bool = True,
    scale: float = 1.0,
    lanes: Sequence[int] = (),
    before_fold: Callable[[Reducer, int], None] = lambda reducer, leaf: None,
) -> tuple[list[torch.Tensor], Outcome]:
    """One worker's part in one reduce point over all the shares: the result's views, and the outcome."""
    weights = weights or [1.0] * len(shares)
    reducer = Reducer(tensors, count, peers)
    plan = Plan.of(len(shares), peers.size)
    reducer.open(plan, len(lanes))
    for leaf in plan.leaves_of(peers.rank):
        before_fold(reducer, leaf)
        reducer.fold(leaf, shares[leaf], weights[leaf])
    outcome = reducer.commit(7, 0, lanes, mean, scale)
    return outcome.views, outcome


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-3, 3e38, 1e-45, 1e16, -1e16, 0.1]


@dataclass
class Case:
    workers: int
    tensors: list[torch.Tensor]
    count: int
    shares: list[Grads]
    weights: list[float]

    def want(self, index: int, mean: bool = True, scale: float = 1.0) -> torch.Tensor:
        weight = tree_weight(self.weights)
        divisor = scale * (weight if mean and weight else 1.0)
        return reduced([share[index] for share in self.shares], self.weights, self.tensors[index], divisor)


up_to_four = st.integers(1, 4)


@st.composite
def cases(draw: st.DrawFn, workers: st.SearchStrategy[int] = up_to_four) -> Case:
    shape = st.sampled_from([(), (1,), (3,), (2, 3), (17,), (0,)])
    tensors = [
        torch.empty(draw(shape), dtype=draw(st.sampled_from([torch.float32, torch.float64])))
        for _ in range(draw(st.integers(1, 4)))
    ]
    count = draw(st.integers(0, len(tensors)))
    leaves = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def value(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        odd = draw(st.sampled_from([None, *SPECIAL]))
        return drawn if odd is None else torch.full_like(drawn, odd)

    shares = [
        [None if index < count and draw(st.booleans()) else value(tensor) for index, tensor in enumerate(tensors)]
        for _ in range(leaves)
    ]
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 0.1]), min_size=leaves, max_size=leaves))
    if draw(st.booleans()):
        weights = [1.0] * leaves
    return Case(draw(workers), tensors, count, shares, weights)


def zeros(*signs: float) -> torch.Tensor:
    return torch.tensor([0.0 * sign for sign in signs])


def sparse(rows: list[int], size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values.to(dtype), (size, 3), check_invariants=True
    ).coalesce()
