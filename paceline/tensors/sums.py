"""Adding tensors in the tree's order, within the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.tensors.tree import Step

CHUNK = 1 << 17
"""Elements added at a time: two chunks of fp32 fit a core's second-level cache."""


def chunks(count: int) -> list[slice]:
    """So many elements, cut into stretches that fit the cache."""
    return [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


def scratch_rows(steps: Sequence[Step]) -> list[int]:
    """Which row of scratch memory each addition writes: that of an operand, where one is scratch.

    >>> scratch_rows([(0, 1, 4), (2, 3, 5), (4, 5, 6)])
    [0, 1, 0]
    """
    row_of: dict[int, int] = {}
    free: list[int] = []
    for left, right, result in steps:
        free += [row_of[register] for register in (right, left) if register in row_of]
        row_of[result] = free.pop() if free else len(set(row_of.values()))
    return [row_of[result] for _, _, result in steps]


class Scratch:
    """Memory for sums in the making. Sums that never run at once share one, so that it stays cached."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def row(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """As many elements as `like`: at most a chunk, on the host."""
        key = (number, like.dtype, like.device)
        if key not in self._rows or self._rows[key].numel() < like.numel():
            size = like.numel() if like.is_cuda else max(CHUNK, like.numel())
            self._rows[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._rows[key][: like.numel()]


class TreeSum:
    """The sources added up as `steps` say, into each of `outs`.

    It is added up chunk by chunk in scratch memory and copied out while it is still in the cache. Views
    are cut once: a sum that is taken at every step costs its additions and little else.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        steps: Sequence[Step],
        outs: Sequence[torch.Tensor],
        scratch: Scratch | None = None,
    ) -> None:
        scratch = scratch or Scratch()
        rows = scratch_rows(steps)
        self._windows = []
        for window in chunks(outs[0].numel()) if outs[0].device.type == "cpu" else [slice(0, outs[0].numel())]:
            targets = [out[window] for out in outs]
            total = targets.pop() if len(outs) == 1 else scratch.row(rows[-1] if rows else 0, targets[0])
            registers = [source[window] for source in sources]
            adds: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
            for (left, right, _), row in zip(steps, rows, strict=True):
                last = len(adds) == len(steps) - 1
                registers.append(total if last else scratch.row(row, total))
                adds.append((registers[left], registers[right], registers[-1]))
            self._windows.append((None if adds else registers[0], adds, total, targets))

    def add(self, divisor: float = 1.0) -> None:
        """Each of the outs = the sum / divisor."""
        for only, adds, total, targets in self._windows:
            for left, right, result in adds:
                torch.add(left, right, out=result)
            if only is not None:
                total.copy_(only)
            if divisor != 1.0:
                _divide(total, divisor)
            for target in targets:
                target.copy_(total)


def is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _divide(target: torch.Tensor, divisor: float) -> None:
    if is_power_of_two(divisor):
        target.mul_(1.0 / divisor)  # exact for a power of two, and four times as fast
    elif target.is_cuda:
        # CUDA turns a division by a plain number into a product: other bits than on the host.
        target.div_(torch.tensor(divisor, dtype=target.dtype, device=target.device))
    else:
        target.div_(divisor)
