"""What a codec keeps for each share of each reduce point, from one step to the next.

There are two of each: what the last committed step left, which is only read, and what the step in hand makes
of it. So a share may be computed again, by whoever it falls to after a death. On one machine both lie in
memory that the workers share and that outlives them; then there is nothing to hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.tensors.codecs.base import Codec, Shapes
from paceline.tensors.codecs.feedback import kept_at_first
from paceline.tensors.segment import ALIGN, Segment

Allocate = Callable[[str, int], int]
"""(name, size) → a descriptor of shared memory, the same for every worker that asks by that name."""

_LINE = ALIGN // 4


class Kept:
    """`allocate`: where the workers' shared memory comes from; None: this worker's own will do."""

    def __init__(self, codec: Codec, shapes: Shapes, allocate: Allocate | None) -> None:
        self._first, self._allocate = kept_at_first(codec, shapes), allocate
        self._width = -(-self._first.numel() // _LINE) * _LINE
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        """For each point of a step, by its number and its shares: two rows a share."""
        self._commits: dict[tuple[int, int], int] = {}
        self._mine: dict[tuple[int, int], list[int]] = {}
        """The shares whose rows this worker has to tell, where memory is not shared."""
        self._mine_before: list[int] = []
        """The same before the last commit."""
        self._whole = True
        self._at = (0, 0)

    def open(self, call: int, leaves: int) -> None:
        """This point is in hand now."""
        self._at = (call, leaves)
        if self._at not in self._memory:
            self._memory[self._at], self._commits[self._at] = self._allocated(call, leaves), 0
            self._mine[self._at] = []

    def _allocated(self, call: int, leaves: int) -> torch.Tensor:
        count = 2 * leaves * self._width
        if self._allocate is None or not count:
            return torch.zeros(2, leaves, self._width)
        fd = self._allocate(f"kept-{call}-{leaves}-{self._width}", 4 * count)
        return Segment(fd, 4 * count).tensor(0, count, torch.float32).view(2, leaves, self._width)

    def old(self, leaf: int) -> torch.Tensor:
        """What the last committed step has left."""
        if not self._commits[self._at]:
            return self._first
        return self._row(self._at, 0, leaf)

    def new(self, leaf: int) -> torch.Tensor:
        return self._row(self._at, 1, leaf)

    def _row(self, at: tuple[int, int], later: int, leaf: int) -> torch.Tensor:
        return self._memory[at][(self._commits[at] + later) % 2, leaf, : self._first.numel()]

    def commit(self, mine: Sequence[int]) -> None:
        """All have met at the point in hand: what is new is old. `mine` are the shares that this worker has computed."""
        self._commits[self._at] += 1
        self._mine_before = self._mine[self._at]
        self._mine[self._at], self._whole = list(mine), not self.scattered

    def undo(self) -> None:
        """The last commit does not count, and the same is met for again: what was old before is still there, as nothing was
        encoded since."""
        self._commits[self._at] -= 1
        self._mine[self._at] = self._mine_before

    # where workers share no memory

    @property
    def scattered(self) -> bool:
        """Whether what others have computed is with them alone."""
        return self._allocate is None and bool(self._width)

    @property
    def whole(self) -> bool:
        """Whether all of it is here; so it is for all workers, or for none."""
        return self._whole

    @property
    def needs_others(self) -> bool:
        """Whether this worker has trained, and others alone have what was kept for their shares."""
        return not self._whole and any(self._mine.values())

    def own(self) -> list[list[Any]]:
        """What the others do not have."""
        return [
            [*at, self._commits[at], mine, [self._row(at, 0, leaf) for leaf in mine]]
            for at, mine in self._mine.items()
            if mine
        ]

    def take_in(self, everyone: Sequence[list[list[Any]]], first: bool) -> None:
        """What all workers told of their own. From now on all have all, and the first of them is to tell it."""
        for call, leaves, commits, mine, rows in (point for said in everyone for point in said):
            self.open(call, leaves)
            self._commits[self._at] = commits
            for leaf, row in zip(mine, rows, strict=True):
                self._row(self._at, 0, leaf).copy_(row)
        self._mine = {at: list(range(at[1])) if first and self._commits[at] else [] for at in self._mine}
        self._whole = True

    def take_back(self, own: list[list[Any]]) -> None:
        """What another process told of its own, whose place this one takes."""
        for call, leaves, commits, mine, rows in own:
            self.open(call, leaves)
            self._commits[self._at], self._mine[self._at] = commits, list(mine)
            for leaf, row in zip(mine, rows, strict=True):
                self._row(self._at, 0, leaf).copy_(row)

    def forget(self) -> None:
        """Nothing is kept: as at first."""
        self._memory, self._commits, self._mine, self._whole = {}, {}, {}, True

    # newcomers and checkpoints

    def capture(self) -> list[list[Any]]:
        """Between two steps, of each point: its number, its shares, how often it was met, whether all rows are here, and
        the rows. The tensors are references."""
        return [
            [*at, commits, self._whole, [self._row(at, 0, leaf) for leaf in range(at[1])]]
            for at, commits in self._commits.items()
            if commits
        ]

    def fits(self, captured: list[list[Any]]) -> bool:
        """Whether that was kept of the same tensors."""
        return all(row.numel() == self._first.numel() for *_, rows in captured for row in rows)

    def restore(self, captured: list[list[Any]]) -> None:
        """Those who share memory all write the same: it may be there already."""
        for call, leaves, commits, whole, rows in captured:
            self.open(call, leaves)
            self._commits[self._at], self._whole = commits, whole
            self._mine[self._at] = list(range(leaves)) if whole else []
            for leaf, row in enumerate(rows):
                self._row(self._at, 0, leaf).copy_(row)
