"""Sparse gradients: rows on the wire, added in the order of the tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.peers import Alone
from paceline.tensors.sparse import SparseLeaf, add_sparse, pack, unpack
from tests.tensors.arithmetic import reduced, same, tree_sum, tree_weight
from tests.tensors.points import Grads, reduce, sparse
from tests.tensors.together import CPU, together

rows = st.lists(st.integers(0, 6), max_size=6, unique=True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), rows), max_size=4), st.sampled_from([32, 64, 16]))
def test_packed_rows_come_back_as_they_were(items: list[tuple[int, int, list[int]]], width: int) -> None:
    dtype = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}[width]
    leaves = [SparseLeaf(index, leaf, sparse(at, 7, leaf, dtype)) for index, leaf, at in items]
    raw = pack(leaves)
    assert isinstance(raw, bytes)
    for old, new in zip(leaves, unpack(raw), strict=True):
        assert (old.index, old.leaf) == (new.index, new.leaf)
        assert new.value.is_coalesced() and new.value.shape == old.value.shape
        assert torch.equal(new.value.indices(), old.value.indices())
        assert same(new.value.values(), old.value.values())


def test_packed_tensors_of_two_sparse_dimensions() -> None:
    value = torch.sparse_coo_tensor(
        torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.5, 2.5]), (3, 2), check_invariants=True
    ).coalesce()
    (back,) = unpack(pack([SparseLeaf(0, 0, value)]))
    assert torch.equal(back.value.to_dense(), value.to_dense())


@given(st.lists(st.none() | rows, min_size=1, max_size=9), st.sampled_from([1.0, 3.0]))
def test_sparse_sums_are_the_dense_trees(drawn: list[list[int] | None], divisor: float) -> None:
    """Where a row has values, the tree's order; rows nobody touched are not there."""
    leaves = [SparseLeaf(4, k, sparse(at, 7, k)) for k, at in enumerate(drawn) if at is not None]
    sums = add_sparse(leaves, len(drawn), divisor, CPU)
    if not leaves:
        assert sums == {}
        return
    absent = torch.zeros(7, 3)
    dense = {item.leaf: item.value.to_dense() for item in leaves}
    want = tree_sum([dense.get(leaf, absent) for leaf in range(len(drawn))]) / divisor
    assert list(sums) == [4]
    assert sums[4].is_coalesced()
    assert torch.equal(sums[4].to_dense(), want)
    touched = {row for at in drawn if at is not None for row in at}
    assert set(sums[4].indices()[0].tolist()) == touched


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sparse_and_dense_gradients_travel_in_one_point(workers: int) -> None:
    tensors = [torch.empty(7, 3), torch.empty(2)]
    weights = [1.0, 2.0, 1.0, 3.0, 1.0]
    values = [sparse([leaf, (leaf + 3) % 7], 7, leaf) for leaf in range(5)]
    dense = [torch.randn(2) for _ in range(5)]
    shares: list[Grads] = [[None if leaf == 1 else values[leaf], dense[leaf]] for leaf in range(5)]
    total = tree_weight(weights)
    want_rows = reduced(
        [None if leaf == 1 else values[leaf].to_dense() for leaf in range(5)], weights, torch.empty(7, 3), total
    )
    for views, outcome in together(workers, lambda peers: reduce(peers, tensors, 2, shares, weights)):
        assert torch.equal(outcome.sparse[0].to_dense(), want_rows)
        assert list(outcome.sparse) == [0]
        assert same(views[1], reduced(dense, weights, torch.empty(2), total))
        assert outcome.present[1]


def test_an_uncoalesced_gradient_is_coalesced_before_it_is_weighed() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True)
    assert not twice.is_coalesced()
    _, outcome = reduce(Alone(CPU), [torch.empty(3, 1)], 1, [[twice], [None]], [2.0, 2.0])
    assert outcome.sparse[0].to_dense().tolist() == [[0.0], [1.5], [0.0]]
