"""The workers of one term, as a group that can add up tensors and exchange small messages.

A strategy talks to `Peers` and to nothing below it. A group belongs to one term: when the membership
changes it is abandoned, never repaired, and a new one is built.

At a reduce point every worker calls, in this order:

    parts = peers.open(plan, layout)     memory for this worker's partial sums
    …fill parts…; peers.post(bucket)     a bucket may leave while the rest is still computed
    rows = peers.exchange(key, lanes)    everybody's lanes; all partial sums are in place afterwards
    flats = peers.total(call, divisor)   the tree's total, in memory of this worker's own
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.tree import Plan, Step

Lanes = NDArray[np.int64]
Parts = list[list[torch.Tensor]]
"""For each partial sum of this worker, its flats."""

CHUNK = 1 << 17
"""Elements added at a time: three chunks of fp32 fit a core's second-level cache."""


class Peers(Protocol):
    rank: int
    size: int
    device: torch.device
    """Where the parts and the total lie."""
    waited_s: float
    """Seconds spent waiting for others, so far."""

    def open(self, plan: Plan, layout: Layout, lanes: int) -> Parts: ...
    def post(self, bucket: int) -> None: ...
    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]: ...
    def repost(self, buckets: Sequence[int]) -> None:
        """All agree that these buckets left too early: send them again."""

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        """The total over `divisor`, in this worker's memory for the call-th point of a step: nobody
        else touches it until all have come to the next point of that number."""

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        """Every worker's payload, in the order of ranks."""

    def close(self) -> None: ...


def chunks(count: int) -> list[slice]:
    """So many elements, cut into stretches that fit the cache."""
    return [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


def scratch_rows(sources: int, steps: Sequence[Step]) -> list[int]:
    """Which row of scratch memory each addition writes: that of an operand, where one is scratch.

    >>> scratch_rows(4, [(0, 1, 4), (2, 3, 5), (4, 5, 6)])
    [0, 1, 0]
    """
    row_of: dict[int, int] = {}
    free: list[int] = []
    for left, right, result in steps:
        free += [row_of[register] for register in (right, left) if register in row_of]
        row_of[result] = free.pop() if free else len(row_of) - len(free)
    return [row_of[result] for _, _, result in steps]


class TreeSum:
    """The sources added up as `steps` say, into each of `outs`, within the windows given.

    A window is added up in scratch memory and copied out while it is still in the cache. Views are
    cut once: a sum that is taken at every step costs its additions and little else.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        steps: Sequence[Step],
        outs: Sequence[torch.Tensor],
        windows: Sequence[slice] | None = None,
    ) -> None:
        if windows is None:
            windows = chunks(outs[0].numel()) if outs[0].device.type == "cpu" else [slice(0, outs[0].numel())]
        longest = max((window.stop - window.start for window in windows), default=0)
        rows = scratch_rows(len(sources), steps)
        scratch = [outs[0].new_empty(longest) for _ in range(max(rows, default=0) + 1)]
        self._windows = []
        for window in windows:
            size = window.stop - window.start
            targets = [out[window] for out in outs]
            total = targets.pop() if len(outs) == 1 else scratch[rows[-1] if rows else 0][:size]
            registers = [source[window] for source in sources]
            adds = []
            for (left, right, _), row in zip(steps, rows, strict=True):
                last = len(adds) == len(steps) - 1
                registers.append(total if last else scratch[row][:size])
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


def _divide(target: torch.Tensor, divisor: float) -> None:
    if math.frexp(divisor)[0] == 0.5:
        target.mul_(1.0 / divisor)  # exact for a power of two, and four times as fast
    elif target.is_cuda:
        # CUDA turns a division by a plain number into a product: other bits than on the host.
        target.div_(torch.tensor(divisor, dtype=target.dtype, device=target.device))
    else:
        target.div_(divisor)


class Totals:
    """Private memory for totals, one set for each reduce point of a step: a GAN's first gradients
    outlive its second."""

    def __init__(self, device: torch.device) -> None:
        self.layout: Layout | None = None
        self._device = device
        self._of: dict[int, list[torch.Tensor]] = {}

    def open(self, layout: Layout) -> None:
        if layout is not self.layout:
            self.layout, self._of = layout, {}

    def of(self, call: int) -> list[torch.Tensor]:
        assert self.layout is not None
        if call not in self._of:
            self._of[call] = self.layout.allocate(self._device)
        return self._of[call]


class Alone:
    """A group of one: the same interface, no one to wait for."""

    rank, size, waited_s = 0, 1, 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts: Parts = []
        self._totals = Totals(device)

    def open(self, plan: Plan, layout: Layout, lanes: int) -> Parts:
        if layout is not self._totals.layout:
            self._parts = [layout.allocate(self.device)]
        self._totals.open(layout)
        return self._parts

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        return lanes[None]

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        out = self._totals.of(call)
        for part, flat in zip(self._parts[0], out, strict=True):
            TreeSum([part], (), [flat]).add(divisor)
        return out

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        return [payload]

    def close(self) -> None:
        return


class Watch(Protocol):
    """What a group does while it waits, and when the workers turn out to be at different places."""

    def check(self, seconds: float, laggard: int) -> None:
        """Called at least every 10 ms of a wait; raises to end it."""

    def mismatch(self, others: list[int]) -> NoReturn:
        """These workers came to another meeting than this one did."""


def check_keys(keys: Sequence[int], rank: int, watch: Watch) -> None:
    """All workers must have come to the same meeting."""
    mine = keys[rank]
    others = [worker for worker, key in enumerate(keys) if key != mine]
    if others:
        watch.mismatch(others)
