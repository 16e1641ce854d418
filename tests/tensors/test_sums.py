"""Sums in the tree's order: the same bits whatever the chunks, the outs and the scratch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.sums import Scratch, TreeSum, chunks, scratch_rows
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import same, tree_sum


@pytest.mark.parametrize("outs", [1, 3])
@pytest.mark.parametrize("divisor", [1.0, 7.0, 4.0, 0.5, 3.0 * 65536.0])
def test_adding_by_chunks_is_adding_at_once(monkeypatch: pytest.MonkeyPatch, divisor: float, outs: int) -> None:
    (root,) = Plan.of(5, 5).roots
    sources = [source * 10.0**exponent for exponent, source in enumerate(torch.randn(5, 1001), start=-38)]
    want = tree_sum(sources) / divisor
    for chunk in (1, 64, 1000, 1001, 5000):
        monkeypatch.setattr("paceline.tensors.sums.CHUNK", chunk)
        before = [source.clone() for source in sources]
        results = [torch.full((1001,), float("nan")) for _ in range(outs)]
        TreeSum(sources, root.steps, results).add(divisor)
        assert all(same(result, want) for result in results)
        assert all(same(a, b) for a, b in zip(sources, before, strict=True)), "sources are read only"


@pytest.mark.parametrize("outs", [1, 2])
def test_one_source_is_copied(outs: int) -> None:
    source = torch.tensor([1.0, -0.0, 3.0])
    results = [torch.zeros(3) for _ in range(outs)]
    TreeSum([source], (), results).add()
    assert all(same(result, source) for result in results)
    TreeSum([source], (), results).add(3.0)
    assert all(same(result, source / 3.0) for result in results)


def test_a_sum_can_be_taken_again_and_again_and_share_its_scratch() -> None:
    (root,) = Plan.of(4, 4).roots
    scratch = Scratch()
    sources = [torch.zeros(10) for _ in range(4)]
    outs, others = [torch.empty(10), torch.empty(10)], [torch.empty(7), torch.empty(7)]
    first = TreeSum(sources, root.steps, outs, scratch)
    second = TreeSum([source[:7] for source in sources], root.steps, others, scratch)
    for turn in range(3):
        for number, source in enumerate(sources):
            source.fill_(turn + number)
        first.add()
        second.add(2.0)
        assert outs[0].tolist() == outs[1].tolist() == [4.0 * turn + 6] * 10
        assert others[0].tolist() == others[1].tolist() == [2.0 * turn + 3] * 7


def test_chunks_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tensors.sums.CHUNK", 4)
    assert chunks(0) == []
    assert chunks(9) == [slice(0, 4), slice(4, 8), slice(8, 9)]


@given(st.integers(1, 40), st.integers(1, 40))
def test_scratch_is_never_overwritten_while_it_is_needed(leaves: int, workers: int) -> None:
    plan = Plan.of(leaves, min(leaves, workers))
    (root,) = plan.roots
    rows = scratch_rows(root.steps)
    holds: dict[int, int] = {}
    for (left, right, result), row in zip(root.steps, rows, strict=True):
        for operand in (left, right):
            if operand >= len(root.sources):
                assert operand in holds.values(), f"register {operand} was overwritten"
                del holds[next(row for row, register in holds.items() if register == operand)]
        assert row not in holds, f"row {row} still holds {holds.get(row)}"
        holds[row] = result
    assert len(set(rows)) <= max(1, leaves.bit_length()), "depth, not size, decides the memory"
