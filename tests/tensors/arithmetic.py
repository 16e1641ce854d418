"""What a reduce point must come to, in plain torch: the yardstick for every transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.tensors.layout import sum_dtype
from paceline.tensors.tree import split


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values added in the tree's order."""

    def total(a: int, b: int) -> torch.Tensor:
        return values[a] if b - a == 1 else total(a, split(a, b)) + total(split(a, b), b)

    return total(0, len(values))


def tree_weight(weights: Sequence[float]) -> float:
    def total(a: int, b: int) -> float:
        return weights[a] if b - a == 1 else total(a, split(a, b)) + total(split(a, b), b)

    return total(0, len(weights))


def reduced(
    grads: Sequence[torch.Tensor | None], weights: Sequence[float], like: torch.Tensor, divisor: float
) -> torch.Tensor:
    """One tensor's total over its leaves; an absent gradient is +0.0. Halves are weighed and added in fp32."""
    dtype = sum_dtype(like.dtype)
    leaves = [
        torch.zeros(like.shape, dtype=dtype) if grad is None else grad.to(dtype) * weight
        for grad, weight in zip(grads, weights, strict=True)
    ]
    return tree_sum(leaves) / divisor


def bits(tensor: torch.Tensor) -> bytes:
    """They tell -0.0 from +0.0, and one NaN from another."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and bits(left) == bits(right)
