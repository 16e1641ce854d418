"""int8: whole numbers from −127 to 127, times one scale for each block of 256 values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import TINY, Shapes, Stretch, blocks, count, cut, join, number_of, rows, spans

BLOCK = 256


class Blocks:
    """A codec of a byte a value, and a scale for each block. Scales come first in a message."""

    summable, feedback = False, True

    def nbytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        return total + 4 * -(-total // BLOCK)

    def start(self, shapes: Shapes) -> torch.Tensor:
        return torch.empty(0)

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        scales, small = cut_blocks(message, 0, count(shapes))
        return [join(scales[spans(lo, hi, BLOCK)], small[lo:hi]) for lo, hi in stretches]

    def common(self, shape: Sequence[int]) -> int:
        return 0


def cut_blocks(message: torch.Tensor, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of blocks, and a byte for each of the values from `lo` to `hi`."""
    scales, small = cut(message, (torch.float32, number_of(spans(lo, hi, BLOCK))), (torch.int8, hi - lo))
    return scales, small


@dataclass(frozen=True)
class Int8(Blocks):
    """n + 4⌈n/256⌉ bytes. Error: the block's largest |x| over 254."""

    name = "int8"

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        scales = largest(values, BLOCK) / 127
        levels = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
        units = rows(unit(scales), values, BLOCK)
        for block, level, scale in zip(blocks(values, BLOCK), blocks(levels, BLOCK), units, strict=True):
            level.copy_((block / scale).round_().clamp_(-127, 127))
        return join(scales, levels)

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        scales, levels = cut_blocks(message, lo, lo + out.numel())
        for block, level, scale in zip(
            blocks(out, BLOCK, lo), blocks(levels, BLOCK, lo), rows(scales, out, BLOCK, lo), strict=True
        ):
            block.copy_(level).mul_(scale)

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        return spread(largest(values, BLOCK) * (1 / 254 + 2.0**-21), values, BLOCK) + TINY


def int8(number: float) -> Int8:
    return Int8()


def largest(values: torch.Tensor, size: int) -> torch.Tensor:
    """Of each block, the largest |x|."""
    return torch.cat([values.new_empty(0), *(block.abs().amax(1) for block in blocks(values, size))])


def unit(scales: torch.Tensor) -> torch.Tensor:
    """To divide by: nothing is divided by 0. A block with that scale is 0 throughout, or too small to tell."""
    return torch.where(scales == 0, 1.0, scales)


def spread(numbers: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """One number a block, for each of its values."""
    return numbers.repeat_interleave(size)[: values.numel()]
