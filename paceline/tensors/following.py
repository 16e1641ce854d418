"""The group of a newcomer that is in none yet: it goes through its script behind a member of the run.

What comes of each meeting it does not find out with others, but is told by that member, the donor. So it
has nothing to bring, and is never waited for. When all let it in, it is at the same meeting as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import MismatchError
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, TermEnded
from paceline.tensors.remembering import Met, Past
from paceline.tensors.tree import Plan
from paceline.wires.view import View


class Following:
    """`take` waits for the next of the donor's meetings, as bytes; `told` hears who has met in it."""

    ends_together, reads_late, waited_s, sent_bytes = False, True, 0.0, 0

    def __init__(
        self, past: Past, device: torch.device, take: Callable[[], memoryview], told: Callable[[View], None]
    ) -> None:
        self.rank, self.size, self.device = 1, 2, device
        self._past, self._take, self._told = past, take, told
        self._next: Met | None = None

    def _look(self) -> Met:
        if self._next is None:
            self._next = Met.unpack(self._take(), self.device)
        return self._next

    def _go_on(self, key: int) -> None:
        met, self._next = self._look(), None
        if met.key != key:
            raise MismatchError(
                f"a newcomer came to another place in the script than worker {met.view.members[0]} did: every worker must "
                "take the same steps, whenever it comes into the run"
            )
        self._past.complete(met)
        self._told(met.view)

    def plan(self, leaves: int) -> Plan:
        """By which the others have met at the point that comes next. This worker has no share in it."""
        plan = self._look().plan or Plan.of(leaves, 1)  # not a point: `exchange` will see that
        self.rank, self.size = len(plan.ranges), len(plan.ranges) + 1
        return Plan(plan.leaves, (*plan.ranges, ()))

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        return

    def parts(self) -> Parts:
        return []

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        self._go_on(key)
        return self._past.last.rows

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        return [flat.clone() for flat in self._past.last.flats]

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        if self._look().plan is not None and self._look().key == key == self._past.last.key:
            # Sparse rows follow a point by a gather of the same key.
            raise TermEnded("the others have lost a worker behind this point, and have met at it once more")
        self._go_on(key)
        return self._past.last.payloads

    def close(self) -> None:
        return
