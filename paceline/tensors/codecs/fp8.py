"""fp8 (e4m3): 8-bit floats, times one scale for each block of 256 values.

Large values of a block are coarser than with int8, small ones finer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.tensors.codecs.base import TINY, Shapes, blocks, join, rows
from paceline.tensors.codecs.int8 import BLOCK, Blocks, cut_blocks, largest, spread, unit

_MOST = 448.0
_SECOND_BIT = ~(1 << 14)


@dataclass(frozen=True)
class Fp8(Blocks):
    """n + 4⌈n/256⌉ bytes. Error: |x|/16 + the block's largest |x| over 448 · 1024."""

    name = "fp8"

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        if values.device.type not in ("cpu", "cuda"):
            raise UsageError(f"there are no 8-bit floats on {values.device.type}: write int8 instead of fp8")
        scales = largest(values, BLOCK) / _MOST
        small = torch.empty(values.numel(), dtype=torch.float8_e4m3fn, device=values.device)
        units = rows(unit(scales), values, BLOCK)
        for block, byte, scale in zip(blocks(values, BLOCK), blocks(small, BLOCK), units, strict=True):
            byte.copy_((block / scale).clamp_(-_MOST, _MOST))
        return join(scales, small)

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        scales, small = cut_blocks(message, lo, lo + out.numel())
        # An fp16 with the same bits in its place is the same number over 256. Torch's own way takes five times as
        # long on a CPU (measured).
        halves = ((small.to(torch.int16) << 7) & _SECOND_BIT).view(torch.float16)
        for block, half, scale in zip(
            blocks(out, BLOCK, lo), blocks(halves, BLOCK, lo), rows(scales, out, BLOCK, lo), strict=True
        ):
            block.copy_(half).mul_(256.0).mul_(scale)

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        step = spread(largest(values, BLOCK) * (1 / (_MOST * 1024) + 2.0**-21), values, BLOCK)
        return values.abs() / 16 + step + TINY


def fp8(number: float) -> Fp8:
    if not hasattr(torch, "float8_e4m3fn"):
        raise UsageError(f"torch {torch.__version__} has no 8-bit floats (float8_e4m3fn): write int8")
    return Fp8()
