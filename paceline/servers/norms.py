"""The norm of a gradient that lies in pieces on several servers, the same bits however it is cut and dealt.

A parameter's elements are squared in fp64 and added in one binary tree over their positions: node `index` of `level`
covers the blocks index·2^level to (index+1)·2^level of the parameter, a block is `LINE` elements. Each server
sends the largest nodes that its pieces cover, a few dozen numbers for a piece (`partials`); whoever has all of them
adds up the rest of the tree, then the parameters in theirs (`combine`). Only elementwise sums and products are used,
which torch rounds the same way at any length; its own sums and norms do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import nn

from paceline.errors import MismatchError
from paceline.servers.pieces import LINE, Piece

_CHUNK = 1024 * LINE
"""Squares are taken by chunks that stay in the cache. Blocks do not depend on it."""


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """The sum of squares under one node of a parameter's tree."""

    param: int
    level: int
    index: int
    value: float


def partials(piece: Piece, gradient: torch.Tensor) -> list[Partial]:
    """The largest whole nodes of this piece, from the gradient as the optimizer gets it (`Engine.cast`)."""
    if not len(gradient):
        return []
    sums = torch.cat([_blocks(gradient[at : at + _CHUNK]) for at in range(0, len(gradient), _CHUNK)])
    return _climb(piece.param, piece.lo // LINE, sums)


def _blocks(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each block; the last one may be short."""
    missing = -len(gradient) % LINE
    wide = gradient.to(torch.float64)
    wide = nn.functional.pad(wide, (0, missing)) if missing else wide
    rows, width = (wide * wide).view(-1, LINE), LINE
    while width > 1:
        width //= 2
        rows = rows[:, :width] + rows[:, width:]
    return rows.view(-1)


def _climb(param: int, start: int, sums: torch.Tensor) -> list[Partial]:
    """Blocks start, start+1, … added in pairs as far up as both halves of a node are there."""
    found, level = [], 0
    while len(sums):
        if start % 2:
            found.append(Partial(param, level, start, float(sums[0])))
            start, sums = start + 1, sums[1:]
        if len(sums) % 2:
            found.append(Partial(param, level, start + len(sums) - 1, float(sums[-1])))
            sums = sums[:-1]
        sums = sums[::2] + sums[1::2]
        start, level = start // 2, level + 1
    return found


def combine(found: Iterable[Partial], sizes: Sequence[int]) -> float:
    """The norm of everything. `sizes` are the parameters' numbers of elements; one without a gradient has no partials."""
    by_param: dict[int, list[Partial]] = {}
    for partial in found:
        by_param.setdefault(partial.param, []).append(partial)
    sums = [_root(param, by_param[param], sizes[param]) for param in sorted(by_param)]
    while len(sums) > 1:
        sums = [sum(sums[at : at + 2]) for at in range(0, len(sums), 2)]
    return math.sqrt(sums[0]) if sums else 0.0


def _root(param: int, nodes: list[Partial], size: int) -> float:
    nodes = sorted(nodes, key=lambda node: node.index << node.level)
    ends = [0, *((node.index + 1) << node.level for node in nodes)]
    if [node.index << node.level for node in nodes] != ends[:-1] or ends[-1] != -(-size // LINE):
        raise MismatchError(
            f"parameter {param} has {size} elements; the partial sums of its norm do not cover these once"
        )
    level, row = 0, {node.index: node.value for node in nodes if node.level == 0}
    top = max(node.level for node in nodes)
    while level < top or len(row) > 1:
        level += 1
        above = {node.index: node.value for node in nodes if node.level == level}
        for index in sorted(row):
            above[index // 2] = above[index // 2] + row[index] if index % 2 else row[index]
        row = above
    return next(iter(row.values()))


def norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """The same bits from whole gradients, each as one row in the order of its memory."""
    sizes = [0 if gradient is None else gradient.numel() for gradient in gradients]
    pieces = [(Piece(k, 0, sizes[k]), gradient) for k, gradient in enumerate(gradients) if gradient is not None]
    return combine([part for piece, gradient in pieces for part in partials(piece, gradient)], sizes)


def coefficient(norm: float, max_norm: float) -> float:
    """What to multiply gradients by: the formula of torch's clip_grad_norm_."""
    return min(max_norm / (norm + 1e-6), 1.0)  # a NaN stays one, as it does there
