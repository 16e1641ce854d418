"""Sparse gradients: only touched rows travel, and are added in the order of the same tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from paceline.tensors.tree import split

_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class SparseLeaf:
    """One share's gradient of one parameter: coalesced, and weighted already."""

    index: int
    leaf: int
    value: torch.Tensor


class _Wire(msgspec.Struct, array_like=True):
    index: int
    leaf: int
    shape: list[int]
    sparse_dims: int
    count: int
    dtype: str
    rows: bytes
    values: bytes


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def pack(leaves: Sequence[SparseLeaf]) -> bytes:
    """Their wire form: a msgspec array of plain bytes."""
    wires = []
    for item in leaves:
        value = item.value
        values = value.values()
        wires.append(
            _Wire(
                item.index,
                item.leaf,
                list(value.shape),
                value.sparse_dim(),
                values.shape[0],
                str(values.dtype),
                _bytes_of(value.indices()),
                _bytes_of(values) if values.numel() else b"",
            )
        )
    return msgspec.msgpack.encode(wires)


def unpack(raw: bytes) -> list[SparseLeaf]:
    leaves = []
    for wire in msgspec.msgpack.decode(raw, type=list[_Wire]):
        shape = (wire.count, *wire.shape[wire.sparse_dims :])
        dtype = _DTYPES[wire.dtype]
        rows = torch.zeros(wire.sparse_dims, 0, dtype=torch.int64)
        values = torch.zeros(shape, dtype=dtype)
        if wire.count:
            rows = torch.frombuffer(bytearray(wire.rows), dtype=torch.int64).view(wire.sparse_dims, -1)
            values = torch.frombuffer(bytearray(wire.values), dtype=dtype).view(shape)
        value = torch.sparse_coo_tensor(rows, values, wire.shape, is_coalesced=True, check_invariants=False)
        leaves.append(SparseLeaf(wire.index, wire.leaf, value))
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
