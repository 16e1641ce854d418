"""Sparse gradients: only touched rows travel, and are added in the order of the same tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import split


@dataclass(frozen=True)
class SparseLeaf:
    """One share's gradient of one parameter: coalesced, and weighted already."""

    index: int
    leaf: int
    value: torch.Tensor


def pack(leaves: Sequence[SparseLeaf]) -> bytes:
    """Their wire form: plain bytes, nothing pickled."""
    return Snapshot(
        [(item.index, item.leaf, list(item.value.shape), item.value.indices(), item.value.values()) for item in leaves]
    ).to_bytes()


def unpack(raw: bytes) -> list[SparseLeaf]:
    leaves = []
    for index, leaf, shape, rows, values in Snapshot.read(memoryview(raw)).tree:
        value = torch.sparse_coo_tensor(rows, values, shape, is_coalesced=True, check_invariants=False)
        leaves.append(SparseLeaf(index, leaf, value))
    return leaves


def add_sparse(
    leaves: Sequence[SparseLeaf], count: int, divisor: float, device: torch.device
) -> dict[int, torch.Tensor]:
    """For each parameter, the tree's total over its leaves.

    Two coalesced tensors hold at most two values for a row, so their sum is the same whichever comes
    first, and the tree fixes the rest.
    """
    by_index: dict[int, dict[int, torch.Tensor]] = {}
    for item in leaves:
        by_index.setdefault(item.index, {})[item.leaf] = item.value

    def total(values: dict[int, torch.Tensor], a: int, b: int) -> torch.Tensor | None:
        if b - a == 1:
            return values.get(a)
        mid = split(a, b)
        left, right = total(values, a, mid), total(values, mid, b)
        if left is None or right is None:
            return left if right is None else right
        return (left + right).coalesce()

    sums = {}
    for index, values in by_index.items():
        whole = total(values, 0, count)
        assert whole is not None
        sums[index] = (whole if divisor == 1.0 else whole / divisor).coalesce().to(device)
    return sums
