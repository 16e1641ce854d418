"""top-k: the largest values as they are, and where they stand.

A place is told by the 2 bytes of its offset in a stretch of 65,536 values, and by how many places each
stretch has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import Shapes, chosen, count, cut, join

_STRETCH = 1 << 16
_SHIFT = 1 << 15


@dataclass(frozen=True)
class TopK:
    """6k + 4⌈n/65536⌉ bytes, k = share · n. Error: 0 for what is sent, |x| for the rest; that is at most the k-th largest."""

    share: float

    summable, feedback = False, True

    @property
    def name(self) -> str:
        return f"topk:{self.share:g}"

    def nbytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        return 6 * chosen(self.share, total) + 4 * -(-total // _STRETCH)

    def start(self, shapes: Shapes) -> torch.Tensor:
        return torch.empty(0)

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        places = largest_places(values, chosen(self.share, values.numel()))
        counts = torch.bincount(places // _STRETCH, minlength=-(-values.numel() // _STRETCH)).to(torch.int32)
        offsets = (places % _STRETCH - _SHIFT).to(torch.int16)
        return join(values[places], counts, offsets)

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor) -> None:
        number, stretches = chosen(self.share, out.numel()), -(-out.numel() // _STRETCH)
        parts = (torch.float32, number), (torch.int32, stretches), (torch.int16, number)
        values, counts, offsets = cut(message, *parts)
        starts = torch.arange(0, out.numel(), _STRETCH, device=out.device)
        out.zero_()
        out[starts.repeat_interleave(counts, output_size=number) + offsets + _SHIFT] = values

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        left = values.abs()
        left[largest_places(values, chosen(self.share, values.numel()))] = 0.0
        return left


def topk(share: float) -> TopK:
    return TopK(share)


def largest_places(values: torch.Tensor, number: int) -> torch.Tensor:
    """Where the `number` largest |x| stand, in order; of equal ones the first.

    The bits of a positive float, read as an integer, are in the same order. So counting by their upper half finds
    the half in which the last of them is, and counting within that finds its value: three times as fast as torch.topk
    on a CPU (measured), and what is counted comes out the same whoever counts.

    >>> largest_places(torch.tensor([1.0, -3.0, 0.5, 3.0, 3.0]), 2).tolist()
    [1, 3]
    """
    if not number:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    bits = values.view(torch.int32) & 0x7FFFFFFF
    upper = bits >> 16
    half, above = _reached(torch.bincount(upper, minlength=1 << 15), number)
    within = bits[upper == half] & 0xFFFF
    low, more = _reached(torch.bincount(within, minlength=1 << 16), number - above)
    last = half << 16 | low
    equal = torch.nonzero(bits == last).view(-1)[: number - above - more]
    return torch.cat([torch.nonzero(bits > last).view(-1), equal]).sort().values


def _reached(counts: torch.Tensor, number: int) -> tuple[int, int]:
    """Counting down from the last: where the number is reached, and how many are above that."""
    sums = counts.flip(0).cumsum(0)
    at = int(torch.searchsorted(sums, number))
    return len(counts) - 1 - at, int(sums[at] - counts[len(counts) - 1 - at])
