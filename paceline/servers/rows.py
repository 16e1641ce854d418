"""A table of rows by 64-bit id: what lies on a server behind `SparseEmbedding(dim)`.

- A row that nobody has updated is not there. It reads as its initial value, a pure function of (seed, id): the same on
  any server and after any failure. Reading never changes a table, so a read can be repeated, or answered by a backup.
- A row begins with its first update. With `admit=k` it begins with its k-th: before, its updates are counted and their
  gradients dropped. A count costs about 40 bytes.
- `expire(step, after)` forgets rows and counts that no update has touched for that many steps; their memory is used again.
- Ids lie in a space of `PLACES` places, at random and always at the same one. A server holds a range of places; a range is
  copied by `chunks` and `restore`, and dropped by `drop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import MismatchError
from paceline.servers.index import Grown, Ids, Index, Numbers, mixed
from paceline.servers.row_optimizers import SPARE, Block, RowOptimizer, step

PLACES = 1 << 32
Chunk = dict[str, torch.Tensor]
"""Some of a table's rows, or of its counts, as they go to other servers and into checkpoints."""
_BLOCK = 1024
"""Rows that are worked on at a time: with their states they stay in the cache."""
_SALT = 0x9E3779B97F4A7C15


def places(ids: Ids) -> NDArray[np.int64]:
    return (mixed(ids) >> np.uint64(32)).view(np.int64)


def coalesce(ids: Ids, gradients: Block) -> tuple[Ids, Block]:
    """Every id once, in increasing order, with the sum of its gradients, added in the order in which they came."""
    ids, into = np.unique(ids, return_inverse=True)
    sums = torch.zeros(len(ids), gradients.shape[1])
    sums.index_add_(0, torch.from_numpy(into), torch.from_numpy(gradients))
    return ids, sums.numpy()


class Rows:
    def __init__(self, dim: int, optimizer: RowOptimizer, seed: int = 0, scale: float = 0.01, admit: int = 1) -> None:
        """New rows are uniform between -scale and scale. Updates may change the optimizer's values, but not its kind."""
        self.dim, self._kind = dim, type(optimizer)
        self._seed, self._scale, self._admit = seed, scale, admit
        self._index, self._waiting = Index(), Index()
        self._values, self._states = Grown(np.float32, dim), [Grown(np.float32, dim) for _ in optimizer.states]
        self._counts, self._seen = Grown(np.int32), Grown(np.int32)
        self._spare = [np.empty((_BLOCK, dim), dtype=np.float32) for _ in range(SPARE + 1 + len(self._states))]

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The memory that has been written to; it does not shrink."""
        per_row = 4 * self.dim * (1 + len(self._states)) + 4 * self._kind.counts
        return per_row * self._index.top + self._index.nbytes + self._waiting.nbytes + 4 * self._waiting.top

    def initial(self, ids: Ids) -> Block:
        """Two elements from each draw of 64 bits; products of 24 bits with a power of two, and one rounding."""
        draws = np.arange(-(-self.dim // 2), dtype=np.int64) * np.int64(_SALT - (1 << 64))
        keys = mixed(ids, self._seed * _SALT).view(np.int64)
        bits = mixed((keys[:, None] + draws).reshape(-1)).view(np.uint32).reshape(len(ids), -1)[:, : self.dim]
        unit = (bits >> np.uint32(8)).astype(np.float32)
        unit *= 2.0**-23
        unit -= 1.0
        unit *= self._scale
        return unit

    def gather(self, ids: Ids) -> Block:
        """The rows' values now, in the order of the ids."""
        numbers = self._index.find(ids)
        found = np.empty((len(ids), self.dim), dtype=np.float32)
        self._values.array.take(numbers, axis=0, out=found, mode="clip")
        missing = np.flatnonzero(numbers < 0)
        for at in range(0, len(missing), _BLOCK):
            some = missing[at : at + _BLOCK]
            found[some] = self.initial(ids[some])
        return found

    def update(
        self, ids: Ids, gradients: Block, optimizer: RowOptimizer, now: int, known_distinct: bool = False
    ) -> None:
        """One step of these rows, at step `now` of the run. The ids must be distinct (`coalesce`); that is looked at, unless
        the caller knows it."""
        if type(optimizer) is not self._kind or gradients.shape != (len(ids), self.dim):
            raise MismatchError(
                f"this table takes {self._kind.__name__} gradients of shape ({len(ids)}, {self.dim}) for {len(ids)} ids; an "
                f"update brought {type(optimizer).__name__} and {gradients.shape}"
            )
        numbers = self._index.find(ids)
        missing = np.flatnonzero(numbers < 0)
        if not known_distinct:
            self._check_distinct(ids[missing], numbers)
        if len(missing):
            admitted = missing[self._admitted(ids[missing], now)]
            numbers[admitted] = self._begin(ids[admitted], optimizer)
            kept = np.flatnonzero(numbers >= 0)
            if len(kept) < len(ids):
                numbers, gradients = numbers[kept], gradients[kept]
        self._index.touched[numbers] = now
        for at in range(0, len(numbers), _BLOCK):
            self._step(numbers[at : at + _BLOCK], gradients[at : at + _BLOCK], optimizer)

    def _check_distinct(self, missing: Ids, numbers: Numbers) -> None:
        """Each row gets its own mark; of two that are the same, one finds the other's."""
        numbers = numbers[numbers >= 0] if len(missing) else numbers
        touched, marks = self._index.touched, np.arange(len(numbers), dtype=np.int32)
        before = touched.take(numbers)
        touched[numbers] = marks
        twice = (touched.take(numbers) != marks).any()
        touched[numbers] = before
        if twice or len(np.unique(missing)) < len(missing):
            raise MismatchError("an update has the same id twice; its gradients must be added up first")

    def _step(self, numbers: Numbers, gradient: Block, optimizer: RowOptimizer) -> None:
        spare = [block[: len(numbers)] for block in self._spare]
        value, *states = spare[SPARE:]
        homes = [self._values, *self._states]
        for home, block in zip(homes, spare[SPARE:], strict=True):
            home.array.take(numbers, axis=0, out=block, mode="clip")
        count = self._counts.array[:0]
        if self._kind.counts:
            count = self._counts.array.take(numbers) + np.int32(1)
            self._counts.array[numbers] = count
        step(optimizer, value, states, count, gradient, spare[:SPARE])
        for home, block in zip(homes, spare[SPARE:], strict=True):
            _put(home.array, numbers, block)

    def _admitted(self, ids: Ids, now: int) -> NDArray[np.bool_]:
        """Which of these ids, none of which has a row, get one with this update. The others are counted."""
        if self._admit <= 1:
            return np.ones(len(ids), dtype=bool)
        waiting = self._waiting
        numbers = waiting.find(ids)
        strangers = np.flatnonzero(numbers < 0)
        numbers[strangers] = waiting.add(ids[strangers])
        self._reserve()
        self._seen.array[numbers[strangers]] = 0
        seen = self._seen.array
        seen[numbers] += 1
        waiting.touched[numbers] = now
        enough = seen.take(numbers) >= self._admit
        waiting.remove(numbers[enough])
        return enough

    def _begin(self, ids: Ids, optimizer: RowOptimizer) -> Numbers:
        numbers = self._index.add(ids)
        self._reserve()
        for at in range(0, len(ids), _BLOCK):
            some = numbers[at : at + _BLOCK]
            _put(self._values.array, some, self.initial(ids[at : at + _BLOCK]))
            for name, state in zip(optimizer.states, self._states, strict=True):
                _put(state.array, some, np.full((len(some), self.dim), optimizer.begin(name), dtype=np.float32))
        if self._kind.counts:
            self._counts.array[numbers] = 0
        return numbers

    def _reserve(self) -> None:
        for grown in (self._values, *self._states, *([self._counts] if self._kind.counts else [])):
            grown.reserve(self._index.top)
        self._seen.reserve(self._waiting.top)

    def expire(self, now: int, after: int) -> int:
        """Forget what was last touched more than `after` steps ago; returns how many rows went."""
        before = len(self)
        for index in (self._index, self._waiting):
            touched = index.touched
            index.remove(np.flatnonzero((touched >= 0) & (touched < now - after)))
        return before - len(self)

    def drop(self, lo: int = 0, hi: int = PLACES) -> None:
        """Forget what lies at these places: it has moved to another server."""
        for index in (self._index, self._waiting):
            index.remove(_within(index, 0, index.top, lo, hi))

    def chunks(self, lo: int = 0, hi: int = PLACES, rows: int = 8192) -> Iterator[Chunk]:
        """All that lies at these places, by so many rows at a time.

        The table may be updated between two chunks. A copy that gets each chunk and each update in the same order is equal
        in the end: an update of a row that has not come yet is undone when it comes. The counts come first, because a row
        that is admitted meanwhile must be admitted there too.
        """
        for index in (self._waiting, self._index):
            at = 0
            while at < index.top:
                numbers = _within(index, at, at + rows, lo, hi)
                if len(numbers):
                    yield self._chunk(index, numbers)
                at += rows

    def _chunk(self, index: Index, numbers: Numbers) -> Chunk:
        arrays: dict[str, NDArray[Any]] = {"ids": index.ids, "touched": index.touched, **self._homes(index)}
        return {name: torch.from_numpy(array[numbers]) for name, array in arrays.items()}

    def _homes(self, index: Index) -> dict[str, NDArray[Any]]:
        """What is kept by number beside the index itself."""
        if index is self._waiting:
            return {"seen": self._seen.array}
        homes = {"value": self._values.array} | {f"state.{k}": state.array for k, state in enumerate(self._states)}
        return homes | ({"count": self._counts.array} if self._kind.counts else {})

    def restore(self, chunk: Chunk) -> None:
        """Take a chunk of another table of this kind; it replaces what is here of the same ids."""
        arrays = {name: tensor.numpy() for name, tensor in chunk.items()}
        ids, touched = arrays.pop("ids"), arrays.pop("touched")
        for index in (self._index, self._waiting):
            numbers = index.find(ids)
            index.remove(numbers[numbers >= 0])
        index = self._waiting if "seen" in arrays else self._index
        numbers = index.add(ids)
        self._reserve()
        index.touched[numbers] = touched
        homes = self._homes(index)
        for name, array in arrays.items():
            homes[name][numbers] = array


def _within(index: Index, first: int, last: int, lo: int, hi: int) -> Numbers:
    """The live ones of these numbers whose ids lie at these places."""
    live = np.flatnonzero(index.touched[first:last] >= 0) + first
    if lo <= 0 and hi >= PLACES:
        return live
    at = places(index.ids[live])
    return live[(at >= lo) & (at < hi)]


def _put(home: NDArray[Any], numbers: Numbers, block: NDArray[Any]) -> None:
    """home[numbers] = block, by whole rows: twice as fast."""
    row = np.dtype((np.void, block.itemsize * block.shape[1]))
    np.put(home.view(row).reshape(-1), numbers, np.ascontiguousarray(block).view(row).reshape(-1), mode="clip")
