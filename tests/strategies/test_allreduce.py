"""All-reduce: after the shares, .grad is the whole batch's, and buffers have moved by one rule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.strategies.base import Point
from paceline.tensors.tree import Plan
from tests.strategies.one_worker import Driver
from tests.tensors.arithmetic import reduced, same, tree_weight
from tests.tensors.together import Member, together

# Copied, not built anew: threads that draw first weights from the one global generator would disturb each other.
_MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1))
_BATCH_NORM = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def model() -> nn.Module:
    return copy.deepcopy(_MODEL)


def bn() -> nn.Module:
    return copy.deepcopy(_BATCH_NORM)


def share(leaf: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 + leaf))


def gradient_of(leaf: int, rows: int = 3) -> list[torch.Tensor]:
    fresh = model()
    fresh(share(leaf, rows)).pow(2).mean().backward()
    return [p.grad for p in fresh.parameters() if p.grad is not None]


def wanted(leaves: int, weights: list[float] | None = None) -> list[torch.Tensor]:
    weights = weights or [1.0] * leaves
    each = [gradient_of(leaf) if weights[leaf] else None for leaf in range(leaves)]
    return [
        reduced([g and g[index] for g in each], weights, param, tree_weight(weights))
        for index, param in enumerate(model().parameters())
    ]


def check(driver: Driver, leaves: int, weights: list[float] | None = None) -> None:
    driver.step(leaves, lambda leaf: driver.replica.models[0](share(leaf)).pow(2).mean().backward(), weights)
    for got, want in zip(driver.grads(), wanted(leaves, weights), strict=True):
        assert got is not None and same(got, want)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_gradient_is_the_trees_mean_at_any_worker_count_and_step(workers: int) -> None:
    """From the second step on, buckets leave during backward."""

    def work(peers: Member) -> None:
        driver = Driver([model()], peers)
        for leaves in (4, 4, 7, 3, 4):
            check(driver, leaves)
        driver.close()

    together(workers, work)


def test_weights_count_and_a_share_without_samples_does_not() -> None:
    def work(peers: Member) -> None:
        driver = Driver([model()], peers)
        for weights in ([3.0, 3.0, 2.0, 2.0], [3.0, 3.0, 2.0, 0.0], [1.0] * 4, [5.0, 1.0, 0.0, 0.0]):
            check(driver, 4, weights)
        driver.close()

    together(2, work)


def test_one_backward_more_than_before_is_seen_by_all() -> None:
    """The buckets have left by then: they are folded and sent again."""

    def work(peers: Member) -> list[int]:
        driver = Driver([model()], peers)
        check(driver, 2)
        check(driver, 2)
        quiet = list(peers.reposted)

        def twice(leaf: int) -> None:
            for _ in range(2 if peers.rank else 1):
                driver.replica.models[0](share(leaf)).pow(2).mean().backward()

        driver.step(2, twice)
        first, second = gradient_of(0), gradient_of(1)
        for got, one, two in zip(driver.grads(), first, second, strict=True):
            assert got is not None and same(got, (one + (two + two)) / 2)
        driver.close()
        return quiet

    assert together(2, work) == [[], []]


def test_a_weight_told_after_backward_still_counts() -> None:
    """run.weight() belongs before backward; after it, the buckets have left and must be folded again."""

    def work(peers: Member) -> None:
        net = model()
        driver = Driver([net], peers)
        for late in (False, False, True):
            told = [3.0, 5.0] if late else [1.0, 1.0]

            def backward(leaf: int, told: list[float] = told) -> None:
                net(share(leaf)).pow(2).mean().backward()
                driver.strategy.weigh(told[leaf])

            driver.step(2, backward)
            for got, want in zip(driver.grads(), wanted(2, told), strict=True):
                assert got is not None and same(got, want)
        driver.close()

    together(2, work)


@pytest.mark.parametrize("way", ["in place", "replaced", "dropped"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_script_does_to_a_shares_gradient_counts(workers: int, way: str) -> None:
    """Clipping or masking inside the loop over run.slots(): after backward, when buckets have left already."""

    def work(peers: Member) -> None:
        net = model()
        driver = Driver([net], peers)

        def backward(leaf: int) -> None:
            net(share(leaf)).pow(2).mean().backward()
            for param in net.parameters():
                assert param.grad is not None
                if way == "in place":
                    param.grad.mul_(0.5)
                else:
                    param.grad = param.grad * 0.5 if way == "replaced" else None

        for step in range(3):
            driver.step(4, backward)
            for got, want in zip(driver.grads(), wanted(4), strict=True):
                if way == "dropped":
                    assert got is None, f"step {step}"
                else:
                    assert got is not None and same(got, want / 2), f"step {step}"
        driver.close()

    together(workers, work)


def test_a_gradient_from_before_the_step_is_added_once() -> None:
    """Accumulation by the script itself: what it had is kept, not averaged over the shares."""

    def work(peers: Member) -> None:
        driver = Driver([model()], peers)
        before = [torch.full_like(p, 7.0) for p in driver.replica.params]
        for param, value in zip(driver.replica.params, before, strict=True):
            param.grad = value.clone()
        net = driver.replica.models[0]
        driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward(), clear=False)
        for got, want, old in zip(driver.grads(), wanted(2), before, strict=True):
            assert got is not None and same(got, want + old)
        driver.close()

    together(2, work)


def test_accumulating_over_two_steps_adds_the_second_to_the_first() -> None:
    """The script skips zero_grad: .grad is the memory of the last result, which the next one must not overwrite."""
    driver = Driver([model()])
    net = driver.replica.models[0]
    for _ in range(2):
        driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward(), clear=False)
    for got, want in zip(driver.grads(), wanted(2), strict=True):
        assert got is not None and same(got, want + want)


def test_an_untouched_parameter_has_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def work(peers: Member) -> None:
        net = Two()
        driver = Driver([net], peers)

        def backward(leaf: int) -> None:
            part = net.sometimes(share(leaf)).sum() if leaf == 1 else 0.0
            (net.used(share(leaf)).sum() + part).backward()

        driver.step(3, backward)
        assert net.never.weight.grad is None
        assert net.used.weight.grad is not None
        assert net.sometimes.weight.grad is not None
        assert torch.allclose(net.sometimes.weight.grad, share(1).sum(0, keepdim=True) / 3)
        driver.close()

    together(3, work)


def test_a_second_reduce_point_of_a_step_leaves_the_firsts_result_alone() -> None:
    driver = Driver([model()])
    net = driver.replica.models[0]
    driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
    first = [p.grad for p in driver.replica.params]
    kept = driver.grads()
    for param in driver.replica.params:
        param.grad = None
    driver.step(2, lambda leaf: net(share(leaf + 5)).sum().backward(), call=1)
    for now, then in zip(first, kept, strict=True):
        assert now is not None and then is not None and same(now, then)


def test_a_sum_adds_instead_of_averaging() -> None:
    driver = Driver([model()], mean=False)
    net = driver.replica.models[0]
    driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
    for got, one, two in zip(driver.grads(), gradient_of(0), gradient_of(1), strict=True):
        assert got is not None and same(got, one + two)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_thawed_between_steps_is_trained_from_then_on(workers: int) -> None:
    def work(peers: Member) -> None:
        net = model()
        for param in net[0].parameters():  # type: ignore[index]
            param.requires_grad_(False)
        driver = Driver([net], peers)
        driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
        assert net[0].weight.grad is None  # type: ignore[index]
        net[0].requires_grad_(True)  # type: ignore[index]
        for _ in range(2):
            driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
            for got, want in zip([p.grad for p in net.parameters()], wanted(2), strict=True):
                assert got is not None and same(got, want)
        driver.close()

    together(workers, work)


def test_a_layer_frozen_between_steps_gets_no_gradient() -> None:
    net = model()
    driver = Driver([net])
    driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
    net[0].requires_grad_(False)  # type: ignore[index]
    driver.step(2, lambda leaf: net(share(leaf)).pow(2).mean().backward())
    assert net[0].weight.grad is None and net[2].weight.grad is not None  # type: ignore[index]


# buffers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_statistics_move_by_the_weighted_mean_of_the_shares_moves(workers: int) -> None:
    weights = [3.0, 1.0, 2.0]
    alone = []
    for leaf in range(3):
        net = bn()
        net(share(leaf))
        alone.append(net[1])  # type: ignore[index]
    fresh = bn()[1]  # type: ignore[index]

    def work(peers: Member) -> tuple[list[torch.Tensor], int]:
        net = bn()
        driver = Driver([net], peers)
        driver.step(3, lambda leaf: net(share(leaf)).sum().backward(), weights)
        driver.close()
        layer: Any = net[1]  # type: ignore[index]
        return [layer.running_mean.clone(), layer.running_var.clone()], int(layer.num_batches_tracked)

    results = together(workers, work)
    for name, at in (("running_mean", 0), ("running_var", 1)):
        start = getattr(fresh, name)
        move = sum(w * (getattr(layer, name) - start) for w, layer in zip(weights, alone, strict=True)) / 6
        for buffers, counted in results:
            assert torch.allclose(buffers[at], start + move, atol=1e-6)
            assert same(buffers[at], results[0][0][at])
            assert counted == 1, "one step, however many shares"


def test_every_share_starts_from_the_steps_first_statistics() -> None:
    net = bn()
    driver = Driver([net])
    seen = []

    def backward(leaf: int) -> None:
        seen.append(net[1].running_mean.clone())  # type: ignore[index]
        net(share(leaf)).sum().backward()

    driver.step(3, backward)
    assert all(same(value, seen[0]) for value in seen)
    driver.step(3, backward)
    assert same(seen[3], net[1].running_mean) is False and same(seen[3], seen[5])  # type: ignore[index]


# sparse


def test_sparse_rows_of_all_shares_come_together() -> None:
    def work(peers: Member) -> torch.Tensor:
        net = nn.Embedding(10, 2, sparse=True)
        driver = Driver([net], peers)
        for _ in range(2):
            driver.step(4, lambda leaf: net(torch.tensor([leaf, 9])).sum().backward())
        driver.close()
        assert net.weight.grad is not None and net.weight.grad.is_sparse
        return net.weight.grad.to_dense()

    with torch.sparse.check_sparse_tensor_invariants():
        results = together(2, work)
    want = torch.zeros(10, 2)
    want[:4], want[9] = 0.25, 1.0
    assert all(torch.equal(result, want) for result in results)


def test_a_gradient_that_is_sparse_in_one_share_and_dense_in_another_is_whole() -> None:
    net = nn.Embedding(6, 2, sparse=True)
    driver = Driver([net])

    def backward(leaf: int) -> None:
        loss = net(torch.tensor([1])).sum() if leaf else F.linear(torch.ones(1, 2), net.weight).sum()
        loss.backward()

    with torch.sparse.check_sparse_tensor_invariants():
        driver.step(2, backward)
    assert net.weight.grad is not None
    got = net.weight.grad.to_dense() if net.weight.grad.is_sparse else net.weight.grad
    want = torch.full((6, 2), 0.5)
    want[1] = 1.0
    assert torch.equal(got, want)


# flat loops


class Scale:
    scale = 1024.0


def test_fp16_in_a_flat_loop_refuses_a_backward_onto_gradients_that_are_there() -> None:
    """What is there was divided by the scale already; what would be added to it is not."""
    driver = Driver([model()], scaled=Scale())
    strategy, point = driver.strategy, Point(0, 0, 1)

    def begin() -> bool:
        strategy.open(point, Plan.of(1, 1), flat=True)
        return True

    def finish() -> None:
        strategy.fold(0)
        strategy.commit(point, 1, [0, 0, 0])

    def backward() -> None:
        (driver.replica.models[0](share(0)).pow(2).mean() * Scale.scale).backward()

    strategy.on_flat_backward(begin, finish)
    strategy.begin_step()
    backward()
    once = driver.grads()
    assert all(got is not None and same(got, want) for got, want in zip(once, gradient_of(0), strict=True))
    with pytest.raises(UsageError, match="fp16 in a flat loop cannot add a backward to gradients that are there"):
        backward()
    driver.close()
