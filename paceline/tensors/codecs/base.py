"""The one protocol every codec follows: fp32 values in, few bytes out, and back.

Values are one flat fp32 tensor: the tensors of `shapes`, one behind the other. A message is a flat uint8
tensor on the same device. Its size follows from the shapes alone, so nobody has to be told it. The same
values give the same bits, always: ties are broken by index, and nothing is drawn but from a seed.

    codec = parse("int8")
    message = codec.encode(values, shapes, seed, memory)
    codec.decode(message, shapes, seed, out)

A message can be cut: whoever has to know some of the values alone gets an excerpt, which decodes to the same bits.

    excerpt, = codec.excerpts(message, shapes, seed, [(100, 200)])
    codec.decode(excerpt, shapes, seed, out[100:200], 100)

What a message loses is not lost: see `feedback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from paceline.tensors.sums import CHUNK

Shapes = Sequence[Sequence[int]]
Stretch = tuple[int, int]
"""Values from the one to the other."""

TINY = 2.0**-126
"""The smallest normal fp32. Below it scales are too coarse to promise anything finer."""
HUGE = 2.0**100
"""The largest value for which errors are stated."""


class Codec(Protocol):
    @property
    def name(self) -> str:
        """As it is written: `topk:0.01`."""

    @property
    def summable(self) -> bool:
        """Whether messages of one seed, read as fp32, may be added up: the sum is the message of the summed values."""

    @property
    def feedback(self) -> bool:
        """Whether what a message loses is kept and added to the next values."""

    def nbytes(self, shapes: Shapes) -> int:
        """The size of a message."""

    def start(self, shapes: Shapes) -> torch.Tensor:
        """What it remembers from one message to the next, at first: flat, fp32; empty for most."""

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        """`memory` is what it remembers, and is changed in place. `seed` is the same on all sides, and another for
        each step."""

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        """Into `out`, all of it: the values from the `lo`-th on, of a message that was cut to these. ValueError if it cannot
        be one."""

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        """What of a message the values of each stretch are decoded from; of all values, it is the message."""

    def common(self, shape: Sequence[int]) -> int:
        """How many bytes at the end of it all excerpts of one tensor's values have in common."""

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        """For each value, the largest error that its decoded one may have. For values up to `HUGE`."""


def count(shapes: Shapes) -> int:
    """
    >>> count([(2, 3), (4,), ()])
    11
    """
    return sum(prod(shape) for shape in shapes)


def blocks(flat: torch.Tensor, size: int, lo: int = 0) -> list[torch.Tensor]:
    """Rows of `size` elements, and a shorter one for what remains; all are views. On a CPU at most as many at a time
    as fit its cache. A flat that begins with the `lo`-th value begins with what is left of that one's block.

    >>> [tuple(block.shape) for block in blocks(torch.zeros(10), 4)], [len(block[0]) for block in blocks(torch.zeros(10), 4, 7)]
    ([(2, 4), (1, 2)], [1, 4, 1])
    """
    head = min(-lo % size, flat.numel())
    whole = head + (flat.numel() - head) // size * size
    parts = flat[:head].view(1, -1), flat[head:whole].view(-1, size), flat[whole:].view(1, -1)
    most = max(1, CHUNK // size) if flat.device.type == "cpu" else max(1, whole)
    return [chunk for part in parts if part.numel() for chunk in part.split(most)]


def rows(numbers: torch.Tensor, flat: torch.Tensor, size: int, lo: int = 0) -> list[torch.Tensor]:
    """One number a block, as columns beside `blocks(flat, size, lo)`."""
    sizes = [len(block) for block in blocks(flat, size, lo)]
    return [part.view(-1, 1) for part in numbers.split(sizes)] if sizes else []


def spans(lo: int, hi: int, size: int) -> slice:
    """The blocks in which the values from `lo` to `hi` lie.

    >>> spans(255, 257, 256), spans(256, 512, 256)
    (slice(0, 2, None), slice(1, 2, None))
    """
    return slice(lo // size, -(-hi // size))


def number_of(span: slice) -> int:
    return int(span.stop - span.start)


def join(*parts: torch.Tensor) -> torch.Tensor:
    """One message. What has the widest elements comes first, so that all can be read in place."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def cut(message: torch.Tensor, *parts: tuple[torch.dtype, int]) -> list[torch.Tensor]:
    """The parts of a message again: so many elements of each dtype."""
    sizes = [dtype.itemsize * number for dtype, number in parts]
    if message.dtype != torch.uint8 or message.numel() != sum(sizes):
        raise ValueError(f"a message of {message.numel()} bytes came where {sum(sizes)} are due")
    pieces = message.split(sizes)
    return [piece.view(dtype) for piece, (dtype, _) in zip(pieces, parts, strict=True)]


def chosen(share: float, total: int) -> int:
    """How many of so many values are sent.

    >>> chosen(0.01, 5_824_522), chosen(0.01, 3), chosen(0.01, 0)
    (58245, 1, 0)
    """
    return min(total, max(1, round(share * total)))
