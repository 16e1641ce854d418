"""A reduce point: shares in, the tree's total out, whoever folds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Alone, Peers, TermEnded
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.sparse import SparseLeaf, add_sparse, pack, unpack
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import bits, reduced, same, tree_sum, tree_weight
from tests.tensors.together import CPU, Member, Table, together

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


def zeros(*signs: float) -> torch.Tensor:
    return torch.tensor([0.0 * sign for sign in signs])


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


# buckets that leave early


def no_swap(index: int, grad: torch.Tensor) -> None:
    raise AssertionError("these peers send a bucket when it is posted: the gradient stays where it is")


def leaver(params: list[nn.Parameter], final: Callable[[int], Grads], stale: bool, told: bool) -> Any:
    """Before a worker's last fold, let every bucket leave; if stale, with half-done gradients."""

    def before_fold(reducer: Reducer, leaf: int) -> None:
        if not reducer.on_last_leaf:
            return
        for param, grad in zip(params, final(leaf), strict=True):
            param.grad = grad * 0.5 if stale and grad is not None else grad
        for bucket in range(len(reducer.layout.buckets)):
            if reducer.finish_early(bucket, lambda i: params[i].grad, 1.0, no_swap) and told:
                reducer.left_too_early(bucket)

    return before_fold


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3, dtype=torch.float64))]


def random_shares(leaves: int, seed: int) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    like = parameters()
    return [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in like] for _ in range(leaves)]


@pytest.mark.parametrize(("leaves", "workers"), [(1, 1), (2, 2), (3, 3), (4, 1), (4, 2), (6, 2), (7, 3)])
@pytest.mark.parametrize("stale", [False, True])
def test_a_bucket_that_left_early_counts_once(leaves: int, workers: int, stale: bool, seed: int) -> None:
    """Early and final: as if it had left late. Early and changed since: folded again and sent again."""
    shares = random_shares(leaves, seed)

    def work(peers: Member) -> Any:
        params = parameters()
        hook = leaver(params, lambda leaf: shares[leaf], stale=stale, told=stale)
        return *reduce(peers, params, 2, shares, mean=False, before_fold=hook), peers.reposted

    for views, _, reposted in together(workers, work):
        for index, view in enumerate(views):
            assert same(view, tree_sum([share[index] for share in shares]))
        if leaves == workers or not stale:  # only a part of one share leaves early
            assert reposted == ([0, 1] if stale else [])


def test_one_worker_that_left_too_early_makes_all_send_again(seed: int) -> None:
    shares = random_shares(2, seed)

    def work(peers: Member) -> Any:
        params = parameters()
        hook = leaver(params, lambda leaf: shares[leaf], stale=peers.rank == 1, told=peers.rank == 1)
        return *reduce(peers, params, 2, shares, mean=False, before_fold=hook), peers.reposted

    for views, _, reposted in together(2, work):
        assert reposted == [0, 1]
        for index, view in enumerate(views):
            assert same(view, tree_sum([share[index] for share in shares]))


def test_the_peers_of_these_tests_would_show_a_bucket_that_is_not_sent_again() -> None:
    """Else the two tests above could not fail."""

    def work(peers: Member) -> list[float]:
        layout = Layout.of([torch.empty(1)])
        peers.open(Plan.of(2, 2), layout, 0)
        parts = peers.parts()
        parts[0][0].fill_(1.0)
        peers.post(0)
        parts[0][0].fill_(5.0)
        return peers.total(0, 1.0)[0][:1].tolist()

    assert together(2, work) == [[2.0], [2.0]]


def test_early_buckets_beyond_the_62nd_are_sent_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "of", staticmethod(partial(Layout.of, bucket_bytes=64)))
    params = [nn.Parameter(torch.zeros(1)) for _ in range(70)]
    shares: list[Grads] = [[torch.tensor([float(k + leaf)]) for k in range(70)] for leaf in range(2)]

    def work(peers: Member) -> Any:
        mine = [nn.Parameter(p.detach().clone()) for p in params]

        def hook(reducer: Reducer, leaf: int) -> None:
            for param in mine:
                param.grad = torch.full((1,), -99.0)
            for bucket in (1, 66) if peers.rank else ():
                assert reducer.finish_early(bucket, lambda i: mine[i].grad, 1.0, no_swap)
                reducer.left_too_early(bucket)

        return *reduce(peers, mine, 70, shares, mean=False, before_fold=hook), peers.reposted

    for views, _, reposted in together(2, work):
        assert [view.item() for view in views] == [2.0 * k + 1 for k in range(70)]
        assert {1, 66} <= set(reposted) and not {0, 2, 61} & set(reposted)


def test_buckets_of_buffers_and_sparse_gradients_do_not_leave_early() -> None:
    param = nn.Parameter(torch.zeros(4, 2))
    reducer = Reducer([param, torch.empty(2)], 1, Alone(CPU))
    reducer.open(Plan.of(1, 1), 0)
    of_param, of_buffer = reducer.bucket_of(0), reducer.layout.pieces[1].bucket
    param.grad = torch.ones(4, 2).to_sparse(1)
    assert not reducer.finish_early(of_param, lambda i: param.grad, 1.0, no_swap)
    assert not reducer.finish_early(of_buffer, lambda i: param.grad, 1.0, no_swap)
    param.grad = None
    assert reducer.finish_early(of_param, lambda i: param.grad, 1.0, no_swap)
    assert reducer.waits([3]) == [1, 0] and reducer.waits([0]) == [0, 0]


@pytest.mark.parametrize("grad", [-1.0, float("inf"), float("nan")])
def test_a_share_of_no_weight_is_absent_whether_its_bucket_left_early_or_not(grad: float) -> None:
    """The strategy folds such a share (a stand-in for a slot without samples) as None: +0.0, never NaN or -0.0."""
    results = []
    for early in (False, True):
        param = nn.Parameter(torch.zeros(1))
        reducer = Reducer([param], 1, Alone(CPU))
        reducer.open(Plan.of(2, 1), 0)
        reducer.fold(0, [torch.tensor([-0.0])], 1.0)
        param.grad = torch.tensor([grad])
        if early:
            assert not reducer.finish_early(0, [param.grad].__getitem__, 0.0, no_swap)
        reducer.fold(1, [None], 0.0)
        results.append(reducer.commit(1, 0, [], True, 1.0).views[0])
    assert bits(results[0]) == bits(zeros(1.0))
    assert same(results[0], results[1])


def test_where_parts_are_read_late_the_gradient_lies_in_the_part_and_any_change_counts() -> None:
    param = nn.Parameter(torch.zeros(3))
    reducer = Reducer([param], 1, Alone(CPU))
    reducer.open(Plan.of(1, 1), 0)
    param.grad = torch.tensor([1.0, -5.0, 2.0])

    def swap(index: int, grad: torch.Tensor) -> None:
        param.grad = grad

    assert reducer.finish_early(0, lambda i: param.grad, 1.0, swap)
    param.grad.data.clamp_(-1.0, 1.0)  # no version is bumped
    param.grad += torch.ones(3)
    reducer.fold(0, [param.grad], 1.0)
    assert reducer.commit(1, 0, [], True, 1.0).views[0].tolist() == [2.0, 0.0, 2.0]


def test_where_buckets_are_sent_a_change_through_data_is_found() -> None:
    shares: list[Grads] = [[torch.full((3,), 2.0)], [torch.full((3,), 4.0)]]

    def work(peers: Member) -> Any:
        param = nn.Parameter(torch.zeros(3))

        def hook(reducer: Reducer, leaf: int) -> None:
            param.grad = shares[leaf][0]
            assert reducer.finish_early(0, lambda i: param.grad, 1.0, no_swap)
            if peers.rank:
                param.grad.data.fill_(10.0)

        return *reduce(peers, [param], 1, shares, mean=False, before_fold=hook), peers.reposted

    for views, _, reposted in together(2, work):
        assert views[0].tolist() == [12.0] * 3 and reposted == [0]


# sparse gradients


def sparse(rows: list[int], size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values.to(dtype), (size, 3), check_invariants=True
    ).coalesce()


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


# members are lost


class Losing(Member):
    """A member whose group breaks: at this call it learns that somebody is gone."""

    breaks_at = ""

    def _breaks(self, call: str) -> None:
        if self.breaks_at == call:
            raise TermEnded(call)

    def exchange(self, key: int, lanes: Any) -> Any:
        self._breaks("exchange")
        return super().exchange(key, lanes)

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        self._breaks("total")
        flats = super().total(call, divisor)
        self._breaks("totalled")
        return flats

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self._breaks("gather")
        return super().gather(key, payload)


@dataclass
class Worker:
    """One worker's way through the terms of one reduce point."""

    number: int
    reducer: Reducer
    due: list[int]
    kept: int
    outcome: Outcome | None = None


Loss = tuple[frozenset[int], str]
"""Who is lost, and at which call the others learn of it."""


def carry_through(case: Case, losses: Sequence[Loss], device: torch.device = CPU, lanes: int = 2) -> list[Worker]:
    """The workers that are left when each of these losses has broken the point once; they have met in the end."""
    plan = Plan.of(len(case.shares), case.workers)
    table = Table(case.workers)
    everyone = []
    for rank in range(case.workers):
        member = Losing(table, rank, device)
        reducer = Reducer(case.tensors, case.count, member)
        reducer.open(plan, lanes)
        everyone.append(Worker(rank, reducer, plan.leaves_of(rank), len(plan.parts(rank))))
    lost: frozenset[int] = frozenset()
    for gone, breaks_at in [*losses, (frozenset(), "")]:
        meet(case, everyone, breaks_at, lanes)
        if not breaks_at:
            break
        lost |= gone
        everyone = [worker for worker in everyone if worker.number not in lost]
        table, rest = Table(len(everyone)), plan.without(lost)
        for rank, worker in enumerate(everyone):
            worker.due = worker.reducer.carry_on(rest, Losing(table, rank, device), lanes, worker.kept)
            assert worker.due == [leaf for leaf in rest.leaves_of(rank) if leaf not in plan.leaves_of(worker.number)]
    return everyone


def meet(case: Case, everyone: list[Worker], breaks_at: str, lanes: int) -> None:
    """All fold what they have due, each in a thread of its own, and meet; or learn that they cannot."""

    def work(worker: Worker) -> None:
        assert isinstance(worker.reducer.peers, Losing)
        worker.reducer.peers.breaks_at = breaks_at
        for leaf in worker.due:
            worker.reducer.fold(leaf, case.shares[leaf], case.weights[leaf])
        try:
            worker.outcome = worker.reducer.commit(7, 0, [worker.number] * lanes, True, 1.0)
            assert not breaks_at or (breaks_at == "gather" and not has_sparse(case))
        except TermEnded:
            assert breaks_at

    with ThreadPoolExecutor(len(everyone)) as pool:
        for done in [pool.submit(work, worker) for worker in everyone]:
            done.result()


def has_sparse(case: Case) -> bool:
    return any(grad is not None and grad.is_sparse for share in case.shares for grad in share)


def check_carried(case: Case, left: Sequence[Worker]) -> None:
    for worker in left:
        outcome = worker.outcome
        assert outcome is not None
        assert outcome.weight == tree_weight(case.weights)
        assert outcome.rows.tolist() == [[other.number] * 2 for other in left]
        for index, view in enumerate(outcome.views):
            grads = [share[index] for share in case.shares]
            dense = [None if grad is None or grad.is_sparse else grad for grad in grads]
            want = reduced(dense, case.weights, case.tensors[index], outcome.divisor)
            assert same(view, want)
            if index < case.count:
                assert outcome.present[index] == any(grad is not None for grad in dense)
            rows = [grad.to_dense() if grad is not None and grad.is_sparse else None for grad in grads]
            if any(row is not None for row in rows):
                want = reduced(rows, case.weights, case.tensors[index], outcome.divisor)
                assert torch.equal(outcome.sparse[index].to_dense(), want)
            else:
                assert index not in outcome.sparse


@st.composite
def lossy(draw: st.DrawFn) -> tuple[Case, list[Loss]]:
    """A point, with a table of sparse rows among its tensors at times, and one to three losses."""
    case = draw(cases(workers=st.integers(2, 6)))
    if draw(st.booleans()):
        kinds = st.none() | st.lists(st.integers(0, 6), max_size=4, unique=True)
        drawn = [draw(kinds) for _ in case.shares]
        case.tensors.insert(0, torch.empty(7, 3))
        case.count += 1
        for leaf, (share, at) in enumerate(zip(case.shares, drawn, strict=True)):
            share.insert(0, None if at is None else sparse(at, 7, leaf))
    calls = st.sampled_from(["exchange", "total", "totalled", "gather"] if has_sparse(case) else ["exchange", "total"])
    order = draw(st.permutations(range(case.workers)))
    losses, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        more = draw(st.integers(0 if losses else 1, max(1, case.workers - 1 - at)))
        if at + more >= case.workers:
            break
        losses.append((frozenset(order[at : at + more]), draw(calls)))
        at += more
    return case, losses


@given(lossy())
def test_whoever_is_lost_the_rest_come_to_the_same_bits(drawn: tuple[Case, list[Loss]]) -> None:
    case, losses = drawn
    check_carried(case, carry_through(case, losses))


@given(lossy())
def test_losses_on_a_device_that_the_peers_do_not_share(drawn: tuple[Case, list[Loss]]) -> None:
    case, losses = drawn
    check_carried(case, carry_through(case, losses, device=torch.device("cpu", 0)))


def twelve(workers: int) -> Case:
    """Parameters that only some shares touch, a buffer, and weights whose order of addition shows."""
    generator = torch.Generator().manual_seed(workers)
    tensors = [torch.empty(5), torch.empty(2, 3), torch.empty(4)]
    shares: list[Grads] = [
        [
            torch.randn(5, generator=generator) if leaf % 3 else None,
            torch.randn(2, 3, generator=generator) if leaf == 4 else None,
            torch.randn(4, generator=generator),
        ]
        for leaf in range(12)
    ]
    return Case(workers, tensors, 2, shares, [0.1, 1e9, 0.3, 1.0, 0.7, 0.2] * 2)


@pytest.mark.parametrize("lost", [c for n in (1, 2, 3) for c in combinations(range(4), n)], ids=str)
@pytest.mark.parametrize("breaks_at", ["exchange", "total", "totalled"])
def test_every_subset_of_four(lost: tuple[int, ...], breaks_at: str) -> None:
    case = twelve(4)
    check_carried(case, carry_through(case, [(frozenset(lost), breaks_at)]))


@pytest.mark.parametrize("first", range(4))
def test_a_second_loss_in_the_retry_takes_its_shares_of_the_first(first: int) -> None:
    for second in set(range(4)) - {first}:
        case = twelve(4)
        check_carried(case, carry_through(case, [(frozenset({first}), "exchange"), (frozenset({second}), "total")]))


def test_a_presence_that_only_the_lost_one_saw_comes_from_whoever_takes_its_share() -> None:
    case = twelve(3)  # leaf 4, the only one to touch the second parameter, is worker 1's
    for worker in carry_through(case, [(frozenset({1}), "total")]):
        assert worker.outcome is not None and worker.outcome.present[:2] == [True, True]


def test_the_next_point_is_as_if_nothing_had_been() -> None:
    """The reducer that carried on opens another point among those who are left."""
    case = twelve(3)
    left = carry_through(case, [(frozenset({0}), "exchange")])
    table, plan = Table(2), Plan.of(12, 2)
    for rank, worker in enumerate(left):
        worker.reducer.peers = Losing(table, rank)
        worker.reducer.open(plan, 2)
        worker.due = plan.leaves_of(rank)
    meet(case, left, "", 2)
    check_carried(case, left)
