"""top-k: the largest values as they are, and where they stand.

A place is told by the 2 bytes of its offset in a stretch of 65,536 values, and by how many places each
stretch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.tensors.codecs.base import Shapes, Stretch, chosen, count, cut, join, number_of, spans

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
        return _joined(values[places], places, spans(0, values.numel(), _STRETCH))

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        values, places = _read(message, spans(lo, lo + out.numel(), _STRETCH))
        places -= lo
        if values.numel() and not 0 <= int(places.min()) <= int(places.max()) < out.numel():
            raise ValueError(f"a place that is none of {out.numel()} values")
        out.zero_()
        out[places] = values

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        values, places = _read(message, spans(0, count(shapes), _STRETCH))
        return [
            _joined(values[mine], places[mine], spans(lo, hi, _STRETCH))
            for (lo, hi), mine in zip(stretches, within(places, stretches), strict=True)
        ]

    def common(self, shape: Sequence[int]) -> int:
        return 0

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        left = values.abs()
        left[largest_places(values, chosen(self.share, values.numel()))] = 0.0
        return left


def _joined(values: torch.Tensor, places: torch.Tensor, stretches: slice) -> torch.Tensor:
    counts = torch.bincount(places // _STRETCH - stretches.start, minlength=number_of(stretches)).to(torch.int32)
    return join(values, counts, (places % _STRETCH - _SHIFT).to(torch.int16))


def _read(message: torch.Tensor, stretches: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and their places in order. How many there are follows from the message's size."""
    number = (message.numel() - 4 * number_of(stretches)) // 6
    if number < 0:
        raise ValueError(f"a message of {message.numel()} bytes for {number_of(stretches)} stretches")
    parts = (torch.float32, number), (torch.int32, number_of(stretches)), (torch.int16, number)
    values, counts, offsets = cut(message, *parts)
    if counts.numel() and (int(counts.min()) < 0 or int(counts.sum()) != number):
        raise ValueError(f"counts that are not those of {number} values")
    starts = torch.arange(stretches.start, stretches.stop, device=message.device) * _STRETCH
    return values, starts.repeat_interleave(counts, output_size=number) + offsets + _SHIFT


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


def within(places: torch.Tensor, stretches: Sequence[Stretch]) -> list[slice]:
    """Which of them, which are in order, lie in each stretch.

    >>> within(torch.tensor([1, 3, 5]), [(2, 5), (5, 9)])
    [slice(1, 2, None), slice(2, 3, None)]
    """
    bounds = torch.tensor(stretches, dtype=torch.int64, device=places.device)
    return [slice(*each) for each in torch.searchsorted(places, bounds).tolist()]


def _reached(counts: torch.Tensor, number: int) -> tuple[int, int]:
    """Counting down from the last: where the number is reached, and how many are above that."""
    sums = counts.flip(0).cumsum(0)
    at = int(torch.searchsorted(sums, number))
    return len(counts) - 1 - at, int(sums[at] - counts[len(counts) - 1 - at])
