"""A reduce point: shares in, the tree's total out, whoever folds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.peers import Alone
from paceline.tensors.reduce import Reducer
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import bits, same, tree_sum, tree_weight
from tests.tensors.points import Case, Grads, cases, reduce, zeros
from tests.tensors.together import CPU, Member, together


@given(cases(workers=st.just(1)), st.booleans(), st.sampled_from([1.0, 65536.0]))
def test_one_worker_gives_the_trees_arithmetic(case: Case, mean: bool, scale: float) -> None:
    views, outcome = reduce(Alone(CPU), case.tensors, case.count, case.shares, case.weights, mean, scale)
    for index, view in enumerate(views):
        assert same(view, case.want(index, mean, scale))
    assert outcome.weight == tree_weight(case.weights)
    present = [any(share[index] is not None for share in case.shares) for index in range(case.count)]
    assert outcome.present[: case.count] == present


@given(cases())
def test_any_number_of_workers_gives_the_same_bits(case: Case) -> None:
    def work(peers: Member) -> Any:
        return reduce(peers, case.tensors, case.count, case.shares, case.weights, lanes=[peers.rank, -5])

    for views, outcome in together(case.workers, work):
        for index, view in enumerate(views):
            assert same(view, case.want(index))
        assert outcome.weight == tree_weight(case.weights)
        assert outcome.rows.tolist() == [[worker, -5] for worker in range(case.workers)]
        present = [any(s[index] is not None for s in case.shares) for index in range(case.count)]
        assert outcome.present[: case.count] == present


@given(cases())
def test_a_device_that_the_peers_do_not_share_is_staged(case: Case) -> None:
    """cpu:0 is not "cpu" to torch, so it stands in for a GPU here."""

    def work(peers: Member) -> Any:
        return reduce(peers, case.tensors, case.count, case.shares, case.weights)

    for views, _ in together(case.workers, work, device=torch.device("cpu", 0)):
        for index, view in enumerate(views):
            assert same(view, case.want(index))


def test_the_yardstick_is_not_blind_to_the_order() -> None:
    """Else the tests above could not fail."""
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0, 3.0)]
    assert not same(tree_sum(values), sum(values[1:], values[0]))


# absent gradients and the sign of zero


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("shares", "sign"),
    [
        ([-1, -1, -1], -1),  # all negative zeros stay so: nothing was accumulated into +0.0
        ([-1, None, -1], 1),  # absent is +0.0
        ([None, -1, -1], 1),
        ([-1, -1, None], 1),
        ([None, None, None], 1),
        ([1, -1, -1], 1),
    ],
)
def test_the_sign_of_zero(workers: int, shares: list[float | None], sign: float) -> None:
    grads: list[Grads] = [[None if s is None else zeros(s)] for s in shares]
    results = together(workers, lambda peers: reduce(peers, [torch.empty(1)], 1, grads))
    for views, outcome in results:
        assert bits(views[0]) == bits(zeros(sign))
        assert outcome.present == [any(s is not None for s in shares)]


def test_presence_reaches_beyond_one_word() -> None:
    count = 130
    tensors = [torch.empty(1) for _ in range(count)]
    here = [{0, 61, 62, 129}, {63, 123}, {124, 62}]
    shares: list[Grads] = [[torch.ones(1) if i in some else None for i in range(count)] for some in here]
    for _, outcome in together(3, lambda peers: reduce(peers, tensors, count, shares)):
        assert {i for i, present in enumerate(outcome.present) if present} == {0, 61, 62, 63, 123, 124, 129}


def test_memory_of_the_last_point_does_not_shine_through() -> None:
    """The same reducer, twice: a gradient of the first point is absent in the second."""
    reducer = Reducer([torch.empty(2), torch.empty(3)], 2, Alone(CPU))
    for shares, want in (
        ([[torch.ones(2), torch.ones(3)]] * 3, ([3.0, 3.0], [3.0, 3.0, 3.0])),
        ([[None, torch.ones(3)], [None, None], [torch.full((2,), 5.0), None]], ([5.0, 5.0], [1.0, 1.0, 1.0])),
        ([[None, None]] * 3, ([0.0, 0.0], [0.0, 0.0, 0.0])),
    ):
        reducer.open(Plan.of(3, 1), 0)
        for leaf, grads in enumerate(shares):
            reducer.fold(leaf, grads, 1.0)
        outcome = reducer.commit(1, 0, [], False, 1.0)
        assert tuple(view.tolist() for view in outcome.views) == want


def test_plans_of_other_sizes_follow_each_other() -> None:
    reducer = Reducer([torch.empty(4)], 1, Alone(CPU))
    for leaves in (5, 1, 8, 2, 7):
        values = list(torch.randn(leaves, 4))
        reducer.open(Plan.of(leaves, 1), 0)
        for leaf, value in enumerate(values):
            assert reducer.on_last_leaf == (leaf == leaves - 1)
            reducer.fold(leaf, [value.clone()], 1.0)
        outcome = reducer.commit(1, 0, [], False, 1.0)
        assert same(outcome.views[0], tree_sum(values))


def test_gradients_are_read_never_changed() -> None:
    grads = [torch.randn(5) for _ in range(4)]
    before = [grad.clone() for grad in grads]
    reduce(Alone(CPU), [torch.empty(5)], 1, [[grad] for grad in grads], [2.0, 1.0, 3.0, 1.0])
    assert all(same(grad, old) for grad, old in zip(grads, before, strict=True))


def test_shares_out_of_order_are_refused() -> None:
    reducer = Reducer([torch.empty(1)], 1, Alone(CPU))
    reducer.open(Plan.of(2, 1), 0)
    with pytest.raises(AssertionError, match="share 1 came when 0 was due"):
        reducer.fold(1, [torch.ones(1)], 1.0)
    with pytest.raises(AssertionError, match="a share is missing"):
        reducer.commit(1, 0, [], True, 1.0)


def test_strides_of_gradient_and_parameter_may_differ() -> None:
    param = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    grads = [torch.randn(2, 3, 4, 4) for _ in range(3)]
    views, _ = reduce(Alone(CPU), [param], 1, [[grad] for grad in grads], mean=False)
    assert views[0].is_contiguous(memory_format=torch.channels_last)
    assert same(views[0], tree_sum(grads))


# weights


def test_a_mean_is_over_the_weights_and_a_sum_is_not() -> None:
    shares: list[Grads] = [[torch.tensor([1.0])], [torch.tensor([4.0])]]
    views, outcome = reduce(Alone(CPU), [torch.empty(1)], 1, shares, [3.0, 1.0])
    assert views[0].tolist() == [(3 + 4) / 4] and outcome.weight == 4.0
    views, _ = reduce(Alone(CPU), [torch.empty(1)], 1, shares, [3.0, 1.0], mean=False)
    assert views[0].tolist() == [7.0]


def test_no_weight_at_all_divides_by_nothing() -> None:
    views, outcome = reduce(Alone(CPU), [torch.empty(1)], 1, [[None], [None]], [0.0, 0.0])
    assert views[0].tolist() == [0.0] and outcome.weight == 0.0 and outcome.present == [False]


def test_uneven_deals_fold_their_weights_in_the_trees_order() -> None:
    weights = [0.1, 0.7, 0.3, 1e9, 0.5, 0.6, 0.2]
    shares: list[Grads] = [[torch.tensor([1.0])] for _ in weights]
    for workers in (1, 2, 3, 5):
        for _, outcome in together(workers, lambda peers: reduce(peers, [torch.empty(1)], 1, shares, weights)):
            assert outcome.weight == tree_weight(weights)
    assert tree_weight(weights) != sum(weights)


@pytest.mark.parametrize(
    ("dtype", "value", "weights"),
    [
        (torch.float16, 1000.0, [100.0, 50.0]),  # 1000 × 100 is beyond fp16
        (torch.bfloat16, 1.0078125, [3.0, 1.0]),  # × 3 needs one more bit than bf16 has
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_halves_are_weighed_in_fp32(dtype: torch.dtype, value: float, weights: list[float], merged: bool) -> None:
    """The mean of equal gradients is that gradient, however they are weighed."""
    grads: list[Grads] = [[torch.tensor([value], dtype=dtype)] for _ in weights]
    assert grads[0][0] is not None and float(grads[0][0]) == value
    workers = 1 if merged else 2
    for views, _ in together(workers, lambda peers: reduce(peers, [torch.empty(1, dtype=dtype)], 1, grads, weights)):
        assert views[0].dtype == torch.float32
        assert views[0].tolist() == [value]


# buffers


def test_buffers_are_folded_like_gradients() -> None:
    tensors = [torch.empty(2), torch.empty(3), torch.empty((), dtype=torch.int64)]
    shares: list[Grads] = [
        [None, torch.full((3,), 2.0), torch.tensor(1.0, dtype=torch.float64)],
        [torch.ones(2), torch.full((3,), 4.0), torch.tensor(1.0, dtype=torch.float64)],
    ]
    for workers in (1, 2):
        for views, outcome in together(workers, lambda peers: reduce(peers, tensors, 1, shares, [1.0, 3.0])):
            assert outcome.present == [True, True, True]
            assert [view.tolist() for view in views] == [[0.75, 0.75], [3.5, 3.5, 3.5], 1.0]
            assert views[2].dtype == torch.float64


def test_parts_are_told_apart_though_the_first_flat_is_empty() -> None:
    """An fp32 tensor of no elements beside fp64 ones; with 6 leaves on 2 workers each has two parts."""
    tensors = [torch.empty(0), torch.empty(3, dtype=torch.float64)]
    values = [torch.randn(3, dtype=torch.float64) for _ in range(6)]
    shares: list[Grads] = [[torch.empty(0), value] for value in values]
    assert Plan.of(6, 2).most_parts == 2
    for views, _ in together(2, lambda peers: reduce(peers, tensors, 2, shares, mean=False)):
        assert same(views[1], tree_sum(values))
