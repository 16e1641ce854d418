"""The workers of one term, as a group that can add up tensors and exchange small messages.

A strategy talks to `Peers` and to nothing below it. A group belongs to one term: when the membership
changes it is abandoned, never repaired, and a new one is built.

At a reduce point every worker calls, in this order:

    parts = peers.open(plan, layout)     memory for this worker's partial sums
    …fill parts…; peers.post(bucket)     a bucket may leave while the rest is still computed
    rows = peers.exchange(key, lanes)    everybody's lanes; all partial sums are in place afterwards
    peers.total(out, divisor)            the tree's total, in private memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.tree import Plan, program

Lanes = NDArray[np.int64]
Parts = list[list[torch.Tensor]]
"""For each partial sum of this worker, its flats."""

CHUNK = 1 << 16
"""Elements added at a time: three chunks of fp32 fit a core's second-level cache."""


class Peers(Protocol):
    rank: int
    size: int
    device: torch.device
    """Where `parts` and `out` must lie."""
    waited_s: float
    """Seconds spent waiting for others, so far."""

    def open(self, plan: Plan, layout: Layout, lanes: int) -> Parts: ...
    def post(self, bucket: int) -> None: ...
    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]: ...
    def repost(self, buckets: Sequence[int]) -> None:
        """All agree that these buckets left too early: send them again."""

    def total(self, out: Sequence[torch.Tensor], divisor: float) -> None: ...
    def gather(self, key: int, payload: bytes) -> list[bytes]:
        """Every worker's payload, in the order of ranks."""

    def close(self) -> None: ...


def add_in_order(sources: Sequence[torch.Tensor], plan: Plan, out: torch.Tensor, divisor: float) -> None:
    """out = (the tree's total over the cover's sums) / divisor, a chunk at a time."""
    steps = program(plan.cover, plan.leaves)
    chunk = out.numel() if out.is_cuda else CHUNK
    scratch = [out.new_empty(min(chunk, out.numel())) for _ in steps[:-1]]
    for start in range(0, out.numel(), chunk):
        stop = min(start + chunk, out.numel())
        target = out[start:stop]
        registers = [source[start:stop] for source in sources]
        for number, (left, right, _) in enumerate(steps):
            last = number == len(steps) - 1
            result = target if last else scratch[number][: stop - start]
            torch.add(registers[left], registers[right], out=result)
            registers.append(result)
        if not steps:
            target.copy_(registers[0])
        if divisor != 1.0:
            _divide(target, divisor)


def _divide(target: torch.Tensor, divisor: float) -> None:
    if math.frexp(divisor)[0] == 0.5:
        target.mul_(1.0 / divisor)  # exact for a power of two, and four times as fast
    elif target.is_cuda:
        # CUDA turns a division by a plain number into a product: other bits than on the host.
        target.div_(torch.tensor(divisor, dtype=target.dtype, device=target.device))
    else:
        target.div_(divisor)


class Alone:
    """A group of one: the same interface, no one to wait for."""

    rank, size, waited_s = 0, 1, 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts: Parts = []
        self._plan = Plan.of(1, 1)
        self._layout: Layout | None = None

    def open(self, plan: Plan, layout: Layout, lanes: int) -> Parts:
        if layout is not self._layout:
            self._layout, self._parts = layout, [layout.allocate(self.device)]
        self._plan = plan
        return self._parts

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        return lanes[None]

    def total(self, out: Sequence[torch.Tensor], divisor: float) -> None:
        for index, flat in enumerate(out):
            add_in_order([self._parts[0][index]], self._plan, flat, divisor)

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
