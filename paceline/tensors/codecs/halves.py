"""fp16 and bf16: each value rounded to 2 bytes.

Rounding goes to the nearest and is never far: nothing is kept of what it loses, so there is no state
that a death could take away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import Shapes, Stretch, count, cut, join


@dataclass(frozen=True)
class Half:
    """2n bytes. Error: |x|/2048 (fp16: + 2⁻²⁵, and values beyond ±65504 become that) or |x|/256 (bf16)."""

    name: str
    dtype: torch.dtype

    summable = feedback = False

    def nbytes(self, shapes: Shapes) -> int:
        return 2 * count(shapes)

    def start(self, shapes: Shapes) -> torch.Tensor:
        return torch.empty(0)

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        halves = values.to(self.dtype)
        return join(halves.clamp_(-_MOST, _MOST) if self.dtype == torch.float16 else halves)

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        (halves,) = cut(message, (self.dtype, out.numel()))
        out.copy_(halves)

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        return [message[2 * lo : 2 * hi] for lo, hi in stretches]

    def common(self, shape: Sequence[int]) -> int:
        return 0

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        size = values.abs()
        if self.dtype == torch.float16:
            return torch.where(size <= _MOST, size / 2048 + 2.0**-25, size)
        return size / 256 + 2.0**-134


_MOST = torch.finfo(torch.float16).max


def fp16(number: float) -> Half:
    return Half("fp16", torch.float16)


def bf16(number: float) -> Half:
    return Half("bf16", torch.bfloat16)
