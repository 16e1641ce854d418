"""Buckets that leave while backward still runs: each counts once, as it is in the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Alone
from paceline.tensors.reduce import Reducer
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import bits, same, tree_sum
from tests.tensors.points import Grads, reduce, zeros
from tests.tensors.together import CPU, Member, together


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
