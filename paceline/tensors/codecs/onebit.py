"""1-bit: the sign of each value, and for each block of 1024 the mean of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import TINY, Shapes, Stretch, blocks, count, cut, join, number_of, rows, spans
from paceline.tensors.codecs.int8 import largest, spread

BLOCK = 1024


@dataclass(frozen=True)
class OneBit:
    """⌈n/8⌉ + 4⌈n/1024⌉ bytes. Error: at most the block's largest |x|."""

    name = "onebit"
    summable, feedback = False, True

    def nbytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        return -(-total // 8) + 4 * -(-total // BLOCK)

    def start(self, shapes: Shapes) -> torch.Tensor:
        return torch.empty(0)

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        means = [(block.abs() / block.shape[1]).sum(1) for block in blocks(values, BLOCK)]
        return join(torch.cat([values.new_empty(0), *means]), _pack(values < 0))

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        means, packed = _cut(message, lo, lo + out.numel())
        negative = _unpack(packed)[lo % 8 : lo % 8 + out.numel()]
        for block, bits, mean in zip(
            blocks(out, BLOCK, lo), blocks(negative, BLOCK, lo), rows(means, out, BLOCK, lo), strict=True
        ):
            torch.where(bits, -mean, mean, out=block)

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        means, packed = _cut(message, 0, count(shapes))
        return [join(means[spans(lo, hi, BLOCK)], packed[spans(lo, hi, 8)]) for lo, hi in stretches]

    def common(self, shape: Sequence[int]) -> int:
        return 0

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        return spread(largest(values, BLOCK) * (1 + 2.0**-16), values, BLOCK) + TINY


def onebit(number: float) -> OneBit:
    return OneBit()


def _cut(message: torch.Tensor, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = number_of(spans(lo, hi, BLOCK)), number_of(spans(lo, hi, 8))
    means, packed = cut(message, (torch.float32, sizes[0]), (torch.uint8, sizes[1]))
    return means, packed


# Eight bits are moved at a time, as one number of 64 bits; wherever a byte is 0 or 1 no product carries over.
_GATHER = 0x0102040810204080  # times eight bytes: their bits are in the highest byte
_SPREAD = 0x0101010101010101  # times one byte: it is in each of the eight
_OWN_BIT = 0x8040201008040201 - (1 << 64)  # of each of those, another bit


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Eight of them a byte, the first in the lowest place."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.bool, device=bits.device)
    padded[: bits.numel()] = bits
    return ((padded.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return ((packed.to(torch.int64) * _SPREAD) & _OWN_BIT).view(torch.uint8) != 0
