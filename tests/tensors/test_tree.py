"""The tree: whatever the deal, the same additions in the same order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.reduce import merges_after
from paceline.tensors.tree import Plan, deal, fold_scalars, program, split, whole_subtrees

deals = st.tuples(st.integers(1, 70), st.integers(1, 12))
some_deals = deals.filter(lambda it: it[0] >= it[1])


def expression(a: int, b: int) -> Any:
    """The tree over leaves [a, b) written out: a leaf is its number, a sum is a pair."""
    if b - a == 1:
        return a
    mid = split(a, b)
    return (expression(a, mid), expression(mid, b))


def flat(tree: Any) -> list[int]:
    return [tree] if isinstance(tree, int) else flat(tree[0]) + flat(tree[1])


def evaluate(plan: Plan, sums: list[Any], add: Any) -> Any:
    registers = list(sums)
    (root,) = plan.roots
    assert root.sources == tuple(range(len(plan.cover)))
    for left, right, target in root.steps:
        assert target == len(registers), "registers are written once, in order"
        registers.append(add(registers[left], registers[right]))
    return registers[-1]


def pair(left: Any, right: Any) -> Any:
    return (left, right)


def test_a_node_splits_at_the_largest_power_of_two_below_its_length() -> None:
    for length in range(2, 300):
        for a in (0, 1, 6, 100):
            left = split(a, a + length) - a
            assert left & (left - 1) == 0
            assert left < length <= 2 * left


def test_a_tree_of_a_power_of_two_is_balanced() -> None:
    assert expression(0, 8) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert expression(0, 5) == (((0, 1), (2, 3)), 4)


@given(st.integers(0, 300), st.integers(1, 40))
def test_a_deal_covers_the_leaves_with_sizes_that_differ_by_at_most_one(leaves: int, workers: int) -> None:
    ranges = deal(leaves, workers)
    assert len(ranges) == workers
    assert [leaf for lo, hi in ranges for leaf in range(lo, hi)] == list(range(leaves))
    sizes = [hi - lo for lo, hi in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(deals)
def test_the_workers_parts_cover_every_leaf_once_and_in_order(case: tuple[int, int]) -> None:
    plan = Plan.of(*case)
    assert [leaf for a, b in plan.cover for leaf in range(a, b)] == list(range(plan.leaves))
    for worker, ((lo, hi),) in enumerate(plan.ranges):
        assert [leaf for a, b in plan.parts(worker) for leaf in range(a, b)] == list(range(lo, hi))


@given(deals, st.data())
def test_whole_subtrees_are_nodes_and_none_could_be_larger(case: tuple[int, int], data: st.DataObject) -> None:
    leaves = case[0]
    lo = data.draw(st.integers(0, leaves))
    hi = data.draw(st.integers(lo, leaves))
    nodes = {(0, leaves): None}
    todo = [(0, leaves)]
    while todo:
        a, b = todo.pop()
        if b - a > 1:
            for child in ((a, split(a, b)), (split(a, b), b)):
                nodes[child] = (a, b)
                todo.append(child)
    for part in whole_subtrees(lo, hi, 0, leaves):
        assert part in nodes
        above = nodes[part]
        assert above is None or not (lo <= above[0] and above[1] <= hi)


@given(deals)
def test_owners_name_each_part_of_the_cover_by_worker_and_number(case: tuple[int, int]) -> None:
    plan = Plan.of(*case)
    assert tuple(plan.parts(worker)[part] for worker, part in plan.owners) == plan.cover
    assert plan.most_parts == max(len(plan.parts(worker)) for worker in range(case[1]))


@given(deals)
def test_any_deal_gives_the_expression_of_one_worker(case: tuple[int, int]) -> None:
    plan = Plan.of(*case)
    sums = [expression(a, b) for a, b in plan.cover]
    assert evaluate(plan, sums, pair) == expression(0, plan.leaves)


@given(deals)
def test_a_program_never_writes_its_inputs_and_ends_with_the_total(case: tuple[int, int]) -> None:
    plan = Plan.of(*case)
    steps = program(plan.cover, (0, plan.leaves))
    assert len(steps) == len(plan.cover) - 1
    assert [target for _, _, target in steps] == list(range(len(plan.cover), 2 * len(plan.cover) - 1))


@given(deals, st.data())
def test_machines_that_add_up_their_own_parts_give_the_expression_of_one_worker(
    case: tuple[int, int], data: st.DataObject
) -> None:
    plan = Plan.of(*case)
    lost = data.draw(st.sets(st.integers(0, len(plan.ranges) - 1), max_size=len(plan.ranges) - 1))
    plan = plan.without(frozenset(lost))
    workers = len(plan.ranges)
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, max(1, workers - 1)), max_size=4)) - {workers}) if workers > 1 else []
    )
    edges = [0, *cuts, workers]
    sizes = tuple(b - a for a, b in zip(edges, edges[1:], strict=False))
    whole = plan.by_machine(sizes)
    sums = []
    for machine, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        local = plan.among(first, last)
        assert len(local.roots) == len(whole.parts(machine)), "a machine's sums are its parts among the machines"
        for root, (a, b) in zip(local.roots, whole.parts(machine), strict=True):
            registers = [expression(*local.cover[k]) for k in root.sources]
            for left, right, target in root.steps:
                assert target == len(registers)
                registers.append((registers[left], registers[right]))
            assert registers[-1] == expression(a, b)
            sums.append(registers[-1])
    assert evaluate(whole, sums, pair) == expression(0, plan.leaves)


@given(deals, st.data())
def test_after_losses_the_rest_carry_all_leaves_and_the_expression_is_the_same(
    case: tuple[int, int], data: st.DataObject
) -> None:
    plan = Plan.of(*case)
    while len(plan.ranges) > 1 and data.draw(st.booleans()):
        lost = data.draw(st.sets(st.integers(0, len(plan.ranges) - 1), min_size=1, max_size=len(plan.ranges) - 1))
        kept = [plan.parts(worker) for worker in range(len(plan.ranges)) if worker not in lost]
        plan = plan.without(frozenset(lost))
        for worker, parts in enumerate(kept):
            assert plan.parts(worker)[: len(parts)] == parts, "what is computed stays, in its place"
    everything = [leaf for worker in range(len(plan.ranges)) for leaf in plan.leaves_of(worker)]
    assert sorted(everything) == list(range(plan.leaves))
    sums = [expression(a, b) for a, b in plan.cover]
    assert evaluate(plan, sums, pair) == expression(0, plan.leaves)


def test_a_cover_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match="leaf 2 is in no part"):
        program(((0, 2), (3, 4)), (0, 4))


def test_no_leaves_need_no_additions() -> None:
    assert program((), (0, 0)) == ()


@given(some_deals, st.integers(0, 2**31))
def test_torch_sums_are_equal_bit_for_bit_over_random_deals(case: tuple[int, int], seed: int) -> None:
    leaves, _ = case
    values = list(torch.randn(leaves, 7, generator=torch.Generator().manual_seed(seed)) * 1e3)
    want = None
    for workers in {1, case[1], min(leaves, 3)}:
        plan = Plan.of(leaves, workers)
        sums = [subtree(values, a, b) for a, b in plan.cover]
        total = evaluate(plan, sums, torch.add)
        want = total if want is None else want
        assert total.view(torch.int32).tolist() == want.view(torch.int32).tolist()


def subtree(values: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    if b - a == 1:
        return values[a]
    mid = split(a, b)
    return subtree(values, a, mid) + subtree(values, mid, b)


def test_the_order_matters_so_the_bit_tests_can_fail() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    in_a_row = ((values[0] + values[1]) + values[2]) + values[3]
    plan = Plan.of(4, 4)
    assert fold_scalars(values, plan) == (values[0] + values[1]) + (values[2] + values[3])
    assert fold_scalars(values, plan) != in_a_row


@given(some_deals, st.data())
def test_scalars_fold_to_the_same_bits_for_any_deal(case: tuple[int, int], data: st.DataObject) -> None:
    leaves, workers = case
    finite = st.floats(-1e100, 1e100, allow_nan=False)
    values = data.draw(st.lists(finite, min_size=leaves, max_size=leaves))

    def total(a: int, b: int) -> float:
        return values[a] if b - a == 1 else total(a, split(a, b)) + total(split(a, b), b)

    plan = Plan.of(leaves, workers)
    folded = fold_scalars([total(a, b) for a, b in plan.cover], plan)
    assert folded == total(0, leaves)
    assert math.copysign(1, folded) == math.copysign(1, total(0, leaves))


def test_nothing_folds_to_zero() -> None:
    assert fold_scalars([], Plan.of(0, 1)) == 0.0


@given(st.integers(0, 50), st.integers(1, 60))
def test_merges_after_each_leaf_give_the_tree_on_a_stack(a: int, length: int) -> None:
    """Push a leaf, then merge the two on top as often as told: what is left is the whole tree."""
    stack: list[Any] = []
    for leaf, merges in zip(range(a, a + length), merges_after((a, a + length)), strict=True):
        stack.append(leaf)
        for _ in range(merges):
            right = stack.pop()
            stack.append((stack.pop(), right))
    assert stack == [expression(a, a + length)]
    assert flat(stack[0]) == list(range(a, a + length))
