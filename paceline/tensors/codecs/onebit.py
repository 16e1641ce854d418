"""1-bit: the sign of each value, and for each block of 1024 the mean of their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import TINY, Shapes, blocks, count, cut, join, rows
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

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor) -> None:
        total = out.numel()
        means, packed = cut(message, (torch.float32, -(-total // BLOCK)), (torch.uint8, -(-total // 8)))
        negative = _unpack(packed)[:total]
        for block, bits, mean in zip(blocks(out, BLOCK), blocks(negative, BLOCK), rows(means, out, BLOCK), strict=True):
            torch.where(bits, -mean, mean, out=block)

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        return spread(largest(values, BLOCK) * (1 + 2.0**-16), values, BLOCK) + TINY


def onebit(number: float) -> OneBit:
    return OneBit()


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
