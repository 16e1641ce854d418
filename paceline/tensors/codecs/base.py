"""The one protocol every codec follows: fp32 values in, few bytes out, and back.

Values are one flat fp32 tensor: the tensors of `shapes`, one behind the other. A message is a flat uint8
tensor on the same device. Its size follows from the shapes alone, so nobody has to be told it. The same
values give the same bits, always: ties are broken by index, and nothing is drawn but from a seed.

    codec = parse("int8")
    message = codec.encode(values, shapes, seed, memory)
    codec.decode(message, shapes, seed, out)

What a message loses is not lost: see `feedback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from paceline.tensors.sums import CHUNK

Shapes = Sequence[Sequence[int]]

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

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor) -> None:
        """Into `out`, all of it."""

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        """For each value, the largest error that its decoded one may have. For values up to `HUGE`."""


def count(shapes: Shapes) -> int:
    """
    >>> count([(2, 3), (4,), ()])
    11
    """
    return sum(prod(shape) for shape in shapes)


def blocks(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Rows of `size` elements, and a shorter one for what remains; all are views. On a CPU at most as many at a time
    as fit its cache.

    >>> [tuple(block.shape) for block in blocks(torch.zeros(10), 4)]
    [(2, 4), (1, 2)]
    """
    whole = flat.numel() // size * size
    parts = flat[:whole].view(-1, size), flat[whole:].view(1, -1)
    most = max(1, CHUNK // size) if flat.device.type == "cpu" else max(1, whole)
    return [chunk for part in parts if part.numel() for chunk in part.split(most)]


def rows(numbers: torch.Tensor, flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """One number a block, as columns beside `blocks(flat, size)`."""
    sizes = [len(block) for block in blocks(flat, size)]
    return [part.view(-1, 1) for part in numbers.split(sizes)] if sizes else []


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
