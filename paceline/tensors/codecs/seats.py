"""What a codec keeps for workers that run at their own pace: none of it is lost with a worker, and none counts twice.

A worker has a seat, with room for two rows: what its last push that was counted has left, which stands, and what the push in hand
makes of it. Which of them holds is decided where pushes are counted. On one machine seats lie in memory that outlives the
workers, and a seat is a worker's by a lock that the kernel takes back when its process is dead. What lies in a seat that nobody has
goes into somebody's next push, with that worker's own; the one count of that push decides over both seats.

Who dies between the count and its own note of it leaves a row that is in doubt: whoever takes the seat asks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.codecs.base import Codec, Shapes, count
from paceline.tensors.codecs.feedback import kept_at_first
from paceline.tensors.codecs.kept import Allocate
from paceline.tensors.segment import ALIGN, Segment

Counted = Callable[[int, int], bool]
"""(worker, its how-manieth push) → whether that was counted; if not, it never will be."""
_AGE, _WORKER, _OWN, _FULL = _ENTRY = range(4)
_WORDS = 16
_LINE = ALIGN // 4


class Locks(Protocol):
    def take(self, seat: int) -> bool:
        """Whether this worker has the seat now."""

    def release(self, seat: int) -> None: ...


class FileLocks:
    """One byte of a file for each seat. A POSIX lock, since children (a loader's processes) would go on holding any other
    one. `fd` stays open, and is the last one of this file that this process closes: closing any gives up the locks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, seat: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, seat: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, seat)


class Nobody:
    """Locks of a worker that has the only seat."""

    def take(self, seat: int) -> bool:
        return True

    def release(self, seat: int) -> None:
        return


class Seat:
    """Two rows, and of each how old it is, whose push it is of, and whether there is anything in it."""

    def __init__(self, words: NDArray[np.int64], rows: torch.Tensor) -> None:
        self._side, self._entries, self._rows = words[:1], words[1 : 1 + 2 * len(_ENTRY)].reshape(2, -1), rows

    @property
    def in_doubt(self) -> tuple[int, int] | None:
        """The push that decides whether the newer row holds."""
        side = int(self._side[0])
        newer = self._entries[1 - side]
        return (int(newer[_WORKER]), int(newer[_OWN])) if newer[_AGE] > self._entries[side][_AGE] else None

    @property
    def row(self) -> torch.Tensor | None:
        """What holds, if there is anything."""
        side = int(self._side[0])
        return self._rows[side] if self._entries[side][_FULL] else None

    def newer(self) -> torch.Tensor:
        """Where the next row goes. Nothing of it holds before `put`."""
        side = 1 - int(self._side[0])
        self._entries[side][_AGE] = 0
        return self._rows[side]

    def put(self, worker: int, own: int, full: bool) -> None:
        """The newer row is written, and holds once this push is counted."""
        side = int(self._side[0])
        newer = self._entries[1 - side]
        newer[_WORKER], newer[_OWN], newer[_FULL] = worker, own, full
        newer[_AGE] = self._entries[side][_AGE] + 1  # one word, the last: who is killed before has put nothing

    def decide(self, holds: bool) -> None:
        if holds:
            self._side[0] = 1 - int(self._side[0])
        else:
            self._entries[1 - int(self._side[0])][_AGE] = 0

    def under(self, counted: Counted) -> torch.Tensor | None:
        """A copy of what holds, while nothing is counted. Its worker may note meanwhile that its last push was, and go on to
        write its next one over what held before."""
        while True:
            side, doubt = int(self._side[0]), self.in_doubt
            other = doubt is not None and counted(*doubt)
            at = 1 - side if other else side
            found = self._rows[at].clone() if self._entries[at][_FULL] else None
            if int(self._side[0]) == side:
                return found


class Seats:
    """`number` of them; `allocate` is where the workers' shared memory comes from; None: this worker has one of its own."""

    def __init__(self, codec: Codec, shapes: Shapes, number: int, allocate: Allocate | None) -> None:
        self._first = kept_at_first(codec, shapes)
        self._residual = slice(0, count(shapes) if codec.feedback else 0)
        width = -(-self._first.numel() // _LINE) * _LINE
        self.shared = allocate is not None and bool(width)
        number = number if self.shared else 1
        head = 8 * _WORDS * number
        if self.shared:
            assert allocate is not None
            size = head + 8 * width * number
            fd = allocate(f"seats-{number}-{width}", size)
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            self.locks: Locks = FileLocks(self._fd)
            memory = Segment(fd, size)
            words, rows = memory.words(0, _WORDS * number), memory.tensor(head, 2 * width * number, torch.float32)
        else:
            self.locks = Nobody()
            words, rows = np.zeros(_WORDS * number, dtype=np.int64), torch.zeros(2 * width * number)
        halves = rows.view(number, 2, width)[:, :, : self._first.numel()]
        self._seats = [Seat(*each) for each in zip(words.reshape(number, _WORDS), halves, strict=True)]
        self._words, self._own, self._also = words, -1, list[int]()

    def close(self) -> None:
        if self.shared:
            os.close(self._fd)

    # a worker's own

    def sit(self, counted: Counted) -> bool:
        """Whether this worker has a seat."""
        if self._own < 0:
            self._own = next((number for number in range(len(self._seats)) if self._taken(number, counted)), -1)
        return self._own >= 0

    def _taken(self, number: int, counted: Counted) -> bool:
        if not self.locks.take(number):
            return False
        doubt = self._seats[number].in_doubt
        if doubt is not None:
            self._seats[number].decide(counted(*doubt))
        return True

    def old(self, counted: Counted) -> torch.Tensor:
        """What the next push begins with: what this worker has kept, and what lies in seats that nobody has."""
        mine = self._seats[self._own].row
        old = self._first if mine is None else mine
        for number, seat in enumerate(self._seats):
            if number != self._own and (seat.row is not None or seat.in_doubt) and self._taken(number, counted):
                left = seat.row
                if left is None:
                    self.locks.release(number)
                    continue
                if not self._also:
                    old = old.clone()
                old[self._residual] += left[self._residual]
                self._also.append(number)
        return old

    def new(self) -> torch.Tensor:
        return self._seats[self._own].newer()

    def put(self, worker: int, own: int) -> None:
        """What is `new` holds once this push is counted; then nothing is left in the seats that it has emptied."""
        self._seats[self._own].put(worker, own, full=True)
        for number in self._also:
            self._seats[number].newer()
            self._seats[number].put(worker, own, full=False)

    def decide(self, counted: bool) -> None:
        for number in (self._own, *self._also):
            self._seats[number].decide(counted)
        for number in self._also:
            self.locks.release(number)
        self._also = []

    # checkpoints

    def capture(self, counted: Counted) -> list[torch.Tensor]:
        """All rows, while nothing is counted."""
        rows = (seat.under(counted) for seat in self._seats)
        return [row for row in rows if row is not None]

    def fits(self, rows: Sequence[torch.Tensor]) -> bool:
        """Whether they were kept of the same tensors."""
        return all(row.numel() == self._first.numel() for row in rows)

    def lay(self, rows: Sequence[torch.Tensor]) -> None:
        """Before anybody sits. Where there are fewer seats than there were, what is left over is added to others."""
        self._words[:] = 0
        for number, row in enumerate(rows):
            seat = self._seats[number % len(self._seats)]
            held = seat.row
            seat.newer().copy_(row)
            if held is not None:
                seat.newer()[self._residual] += held[self._residual]
            seat.put(-1, 0, full=True)
            seat.decide(holds=True)
