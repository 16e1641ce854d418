"""Tables of rows as they are spread over servers: what a table is, which fragment an id lies in, rows as bytes. Pure.

A table is cut into a fixed number of fragments by a hash of the id: each holds a range of `places`. So where a row lies
does not depend on how many servers there are, and ids of any pattern are spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.servers.index import Ids, mixed
from paceline.servers.row_optimizers import Block, RowOptimizer
from paceline.servers.rows import PLACES, Rows

FRAGMENTS = 8
"""Of each table. More could be dealt out to more servers, and cost more: each is looked up by itself. With 16 a server moved
about a fifth fewer rows a second at batches of 2048 (measured)."""
NOMINAL_BYTES = 4 << 20
"""What a fragment of rows counts for when fragments are dealt out: nobody knows how large it will be."""
_EDGES = np.arange(1, FRAGMENTS, dtype=np.uint64) * np.uint64((PLACES // FRAGMENTS) << 32)
_WORD = 8


class Table(msgspec.Struct, frozen=True):
    dim: int
    optimizer: RowOptimizer
    """Its values as they were when training began; each update brings its own."""
    init: float
    admission: int
    expiry: int
    """In updates; 0: rows are kept for ever."""

    def rows(self, seed: int) -> Rows:
        return Rows(self.dim, self.optimizer, seed, self.init, self.admission)

    @property
    def kind(self) -> str:
        """What cannot be changed between a checkpoint and its resume."""
        return f"dim {self.dim}, {type(self.optimizer).__name__}"


class Touched(NamedTuple):
    """Ids, each once, in the order of their places: those of a fragment lie together."""

    ids: Ids
    keys: NDArray[np.uint64]
    """Their places, and the rest of the hash: increasing."""

    def by_fragment(self, numbers: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """The fragments that any of them lie in, by the number of each fragment of the table, and where these ids are."""
        bounds = [0, *np.searchsorted(self.keys, _EDGES).tolist(), len(self.ids)]
        for number, lo, hi in zip(numbers, bounds, bounds[1:], strict=False):
            if lo < hi:
                yield number, slice(lo, hi)

    def find(self, among: Touched) -> NDArray[np.int64]:
        """The position of each of these ids among others, or -1."""
        if not len(among.ids):
            return np.full(len(self.ids), -1)
        at = np.searchsorted(among.keys, self.keys)
        return np.where(among.keys.take(at, mode="clip") == self.keys, at, -1)

    def take(self, mask: NDArray[np.bool_]) -> Touched:
        return Touched(self.ids[mask], self.keys[mask])


Contribution = tuple[Touched, Block]
NOTHING = Touched(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))


def added(contributions: Sequence[Contribution]) -> Contribution:
    """Each id once, with the sum of its rows in the order in which they came."""
    some = [each for each in contributions if len(each[0].ids)] or list(contributions[:1])
    if len(some) == 1:
        return some[0]
    touched, into = distinct(np.concatenate([each.ids for each, _ in some]))
    sums = torch.zeros(len(touched.ids), some[0][1].shape[1])
    sums.index_add_(0, torch.from_numpy(into), torch.from_numpy(np.concatenate([rows for _, rows in some])))
    return touched, sums.numpy()


def distinct(ids: Ids) -> tuple[Touched, NDArray[np.int64]]:
    """Each id once, and for each that was given its number among these."""
    keys = mixed(ids)
    order = np.argsort(keys)
    sorted_keys = keys[order]
    first = np.ones(len(ids), dtype=bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=first[1:])
    inverse = np.empty(len(ids), dtype=np.int64)
    inverse[order] = np.cumsum(first) - 1
    return Touched(ids[order[first]], sorted_keys[first]), inverse


def pack(ids: Ids, rows: Block | None = None) -> Iterator[memoryview]:
    """A fragment's ids as bytes: how many, the ids, and a row for each; up to a whole word."""
    yield memoryview(len(ids).to_bytes(_WORD, "little"))
    if len(ids):
        yield _bytes(ids)
        if rows is not None:
            yield _bytes(rows)
            yield memoryview(bytes(-rows.nbytes % _WORD))


def packed_size(body: memoryview, dim: int) -> int:
    """How many bytes of this are the first fragment's, with rows so wide; ValueError if it is cut off."""
    count = int.from_bytes(body[:_WORD], "little")
    size = _WORD + _WORD * count + -(-4 * dim * count // _WORD) * _WORD
    if len(body) < max(size, _WORD):
        raise ValueError(f"{len(body)} bytes for {count} rows of {dim}")
    return size


def unpack(body: memoryview, dim: int = 0) -> tuple[Ids, Block]:
    """What was packed, in the same memory."""
    packed_size(body, dim)
    count = int.from_bytes(body[:_WORD], "little")
    ids = np.frombuffer(body, dtype=np.int64, count=count, offset=_WORD)
    rows = np.frombuffer(body, dtype=np.float32, count=count * dim, offset=_WORD + _WORD * count)
    return ids, rows.reshape(count, dim)


def _bytes(array: NDArray[np.int64] | Block) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
