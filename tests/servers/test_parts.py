"""Parts: whatever comes, in whatever order, completes the one tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.parts import Known, New, Parts
from paceline.tensors.tree import Plan, Range, program, split


def nodes(a: int, b: int) -> list[Range]:
    """All subtrees of the tree over [a, b)."""
    return [(a, b)] if b - a == 1 else [(a, b), *nodes(a, split(a, b)), *nodes(split(a, b), b)]


def leaf_set(parts: list[Range]) -> set[int]:
    return {leaf for part in parts for leaf in range(*part)}


def tree_sum(values: list[torch.Tensor], a: int, b: int) -> torch.Tensor:
    return values[a] if b - a == 1 else tree_sum(values, a, split(a, b)) + tree_sum(values, split(a, b), b)


def total(cover: tuple[Range, ...], sums: dict[Range, torch.Tensor], leaves: int) -> list[int]:
    registers = [sums[part] for part in cover]
    for left, right, _ in program(cover, (0, leaves)):
        registers.append(registers[left] + registers[right])
    return registers[-1].view(torch.int32).tolist()


@given(st.integers(1, 40), st.data())
def test_parts_in_any_order_cover_the_tree_once_its_leaves_have_come(leaves: int, data: st.DataObject) -> None:
    parts = Parts(leaves)
    kept: set[Range] = set()
    come: list[Range] = []
    for part in data.draw(st.lists(st.sampled_from(nodes(0, leaves)), max_size=60)):
        match parts.add(part):
            case New(drops):
                assert leaf_set([part]) - leaf_set(come), "it brings leaves that were not there"
                assert set(drops) <= kept
                kept = kept - set(drops) | {part}
            case Known(by):
                assert set(by) <= kept
                assert leaf_set([part]) <= leaf_set(list(by))
        come.append(part)
        assert leaf_set(list(kept)) == leaf_set(come), "nothing is dropped that is needed"
        assert sum(b - a for a, b in kept) == len(leaf_set(come)), "no leaf is kept twice"
        assert leaf_set(list(parts.missing())) == set(range(leaves)) - leaf_set(come)
        assert parts.cover() == (tuple(sorted(kept)) if len(leaf_set(come)) == leaves else None)


@given(st.integers(1, 40), st.integers(0, 2**31), st.data())
def test_whichever_parts_complete_the_tree_first_its_sum_has_the_same_bits(
    leaves: int, seed: int, data: st.DataObject
) -> None:
    values = list(torch.randn(leaves, 5, generator=torch.Generator().manual_seed(seed)) * 1e3)
    sums = {node: tree_sum(values, *node) for node in nodes(0, leaves)}
    parts = Parts(leaves)
    for part in data.draw(st.permutations(nodes(0, leaves))):
        parts.add(part)
        cover = parts.cover()
        if cover is not None:
            assert total(cover, sums, leaves) == sums[0, leaves].view(torch.int32).tolist()


@given(st.integers(2, 40), st.integers(2, 6), st.integers(0, 2**31), st.data())
def test_what_a_dead_worker_and_its_survivors_sent_completes_the_tree_together(
    leaves: int, workers: int, seed: int, data: st.DataObject
) -> None:
    before = Plan.of(leaves, workers)
    lost = data.draw(st.sets(st.integers(0, workers - 1), min_size=1, max_size=workers - 1))
    after = before.without(frozenset(lost))
    early = data.draw(st.lists(st.sampled_from(before.cover), unique=True))
    afresh = Plan.of(leaves, len(after.ranges)).cover
    values = list(torch.randn(leaves, 5, generator=torch.Generator().manual_seed(seed)) * 1e3)
    sums = {node: tree_sum(values, *node) for node in nodes(0, leaves)}
    for later in (after.cover, afresh):
        parts = Parts(leaves)
        for part in [*early, *data.draw(st.permutations(later))]:
            parts.add(part)
        cover = parts.cover()
        assert cover is not None
        assert total(cover, sums, leaves) == sums[0, leaves].view(torch.int32).tolist()


def test_the_sum_of_another_tree_has_other_bits_so_these_tests_can_fail() -> None:
    values = list(torch.randn(8, 50, generator=torch.Generator().manual_seed(1)) * 1e3)
    assert not torch.equal(tree_sum(values, 0, 8), sum(values[1:], values[0]))


@pytest.mark.parametrize("part", [(1, 3), (0, 3), (2, 2), (3, 2), (-1, 4), (0, 5), (4, 5), (0, 0)])
def test_what_is_no_subtree_is_refused_and_changes_nothing(part: Range) -> None:
    parts = Parts(4)
    parts.add((0, 1))
    with pytest.raises(ValueError, match="no subtree of the tree over 4 leaves"):
        parts.add(part)
    assert parts.missing() == ((1, 4),)
