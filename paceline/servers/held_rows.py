"""One fragment of a table of rows at a server: what is said of it, and what comes of that. No sockets, no other servers.

Gradients are kept by the name of the share they are of until the update they are for. Then a row's are added up in the
order of the shares, so its bits do not depend on who brought them, or in which order.

An update that was said is known to every copy of the fragment. Where rows may be read some updates behind, it need not be in
the rows yet: each copy takes it in when it comes to it, at the latest when somebody asks for what it makes (`settle`).
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.servers.held import Said
from paceline.servers.index import Ids
from paceline.servers.messages import Advance, Lay, Part, RowPush, RowUpdate, Surveyed
from paceline.servers.row_optimizers import Block
from paceline.servers.rows import Rows, coalesce
from paceline.servers.tables import Table, pack, packed_size, unpack
from paceline.tensors.snapshot import Snapshot

_SWEEPS = 4
"""Expired rows are looked for so often within the time that a row may rest."""


class _Share(NamedTuple):
    """One share's gradients; which share decides on their order."""

    point: int
    leaf: int


class _Pushed(NamedTuple):
    ids: Ids
    gradients: Block
    behind: dict[int, int]
    """As it was said."""


class HeldRows:
    """As `Held` is to parameters. All methods are called under `changed`.

    `number` is the table's. At most `most` updates that were said are not in the rows yet: `later` is told of each that somebody
    may take in meanwhile."""

    def __init__(
        self,
        number: int,
        table: Table,
        since: int,
        fragment: int = 0,
        most: int = 0,
        later: Callable[[HeldRows], None] = lambda held: None,
    ) -> None:
        self._number, self._table, self.since = number, table, since
        self._fragment, self._most, self._later = fragment, most, later
        self.changed = threading.Condition()
        self.version = -1
        """Updates that are in the rows; -1: nothing was laid yet."""
        self._due: deque[RowUpdate] = deque()
        """The next ones, which were said."""
        self._seed = 0
        self._rows = table.rows(0)
        self._pushed: dict[int, dict[_Share, _Pushed]] = {}
        """By the update that they are for."""
        self._last = b""
        """The last update that was said."""
        self._moved = 0
        self._staleness: dict[int, int] = {}

    @property
    def _said(self) -> int:
        return self.version + len(self._due)

    # what is said

    def length(self, message: Said | Part, body: memoryview) -> int:
        if not isinstance(message, RowPush):
            raise ValueError(f"a {type(message).__name__} of a fragment of rows")
        return packed_size(body, self._table.dim)

    def knows(self, message: Said, body: memoryview) -> bool:
        match message:
            case Lay(_, version):
                return self._said >= max(version, 0)
            case RowPush(count, point, leaf):
                return count <= self._said or _Share(point, leaf) in self._pushed.get(count, {})
            case Advance(count):
                self._check(count, body)
                return count <= self._said
            case _:
                raise ValueError(f"a {type(message).__name__} of a fragment of rows")

    def _check(self, count: int, body: memoryview) -> None:
        if count > self._said + 1:
            raise ValueError(f"row update {count} before {self._said + 1}")
        if count == self._said and self._last and body != self._last:
            raise ValueError(f"workers do not agree on row update {count}")
        try:
            msgspec.msgpack.decode(body, type=RowUpdate)  # nobody is told what cannot be read
        except msgspec.DecodeError as error:
            raise ValueError(f"no row update: {error}") from None

    def do(self, message: Said, body: memoryview) -> None:
        match message:
            case Lay(_, version):
                self._lay(version, body)
            case RowPush(count, point, leaf):
                ids, gradients = unpack(body, self._table.dim)
                pushed = _Pushed(ids.copy(), gradients.copy(), message.behind)
                self._pushed.setdefault(count, {})[_Share(point, leaf)] = pushed
            case Advance():
                self._due.append(msgspec.msgpack.decode(body, type=RowUpdate))
                self._last = bytes(body)
                # Also at a backup, of which nobody reads: one that is slow holds its primary up, or would be ever further behind.
                self.settle(self._said - self._most)
                if self._due:
                    self._later(self)
        self.changed.notify_all()

    def all_said(self) -> Iterator[tuple[Said, list[memoryview]]]:
        states = self.states()
        yield Lay([], self.version), [memoryview(states.packed())]
        for count, shares in self._pushed.items():
            for (point, leaf), (ids, gradients, behind) in shares.items():
                yield RowPush(count, point, leaf, [], behind), list(pack(ids, gradients))

    def states(self) -> Snapshot:
        """Of the moment behind all that was said."""
        self.settle()
        chunks = list(self._rows.chunks())
        return Snapshot({"seed": self._seed, "chunks": chunks, "staleness": self._staleness})

    def _lay(self, version: int, body: memoryview) -> None:
        state = Snapshot.read(body).tree
        self._seed = state["seed"]
        self._rows = self._table.rows(self._seed)
        for chunk in state["chunks"]:
            self._rows.restore(chunk)
        self._staleness = dict(state["staleness"])
        self.version, self._last = version, b""
        self._due.clear()

    # updates

    def settle(self, upto: int | None = None) -> None:
        """Take in what was said, up to this update; or all of it."""
        while self._due and (upto is None or self.version < upto):
            self._advance(self.version + 1, self._due[0])
            self._due.popleft()
            self.changed.notify_all()

    def _advance(self, count: int, update: RowUpdate) -> None:
        shares = self._pushed.pop(count, {})
        for behind in (share.behind for share in shares.values()):
            if (
                self._fragment in behind
            ):  # counted now: what is pushed and not in the rows is not in a checkpoint either
                missed = behind[self._fragment]
                self._staleness[missed] = self._staleness.get(missed, 0) + 1
        sums = [self._sum(shares, point, divisor) for point, divisor in enumerate(update.divisors)]
        ids, gradients = _added([each for each in sums if len(each[0])], self._table.dim)
        if len(ids):
            added_up = len(shares) > 1
            self._rows.update(ids, gradients, update.optimizers[self._number], count, known_distinct=added_up)
            self._moved += len(ids)
        rest = self._table.expiry
        if rest and count % max(1, rest // _SWEEPS) == 0:
            self._rows.expire(count, rest)
        self.version = count

    def _sum(self, shares: dict[_Share, _Pushed], point: int, divisor: float) -> tuple[Ids, Block]:
        mine = [shares[share][:2] for share in sorted(shares) if share.point == point]
        ids, gradients = _added(mine, self._table.dim)
        return ids, gradients / np.float32(divisor) if divisor != 1 else gradients

    # what is asked

    def gather(self, body: memoryview) -> Block:
        ids, _ = unpack(body)
        return self._rows.gather(ids)

    def survey(self, hashed: bool) -> Surveyed:
        digest = _digest(self._rows) if hashed else b""
        return Surveyed(len(self._rows), self._rows.nbytes, self._moved, digest, self._staleness)


def _added(brought: list[tuple[Ids, Block]], dim: int) -> tuple[Ids, Block]:
    """The sum of gradients, each with every id once, in the order in which they are given."""
    if not brought:
        return np.empty(0, dtype=np.int64), np.empty((0, dim), dtype=np.float32)
    if len(brought) == 1:
        return brought[0]
    return coalesce(np.concatenate([ids for ids, _ in brought]), np.concatenate([rows for _, rows in brought]))


def _digest(rows: Rows) -> bytes:
    """Of all that is known of each row, in the order of ids: the same whatever way the rows have come here."""
    digest = hashlib.sha256()
    for kind in (False, True):
        chunks = [chunk for chunk in rows.chunks() if ("seen" in chunk) == kind]
        if chunks:
            order = np.argsort(np.concatenate([chunk["ids"].numpy() for chunk in chunks]))
            for name in sorted(chunks[0]):
                whole = np.concatenate([chunk[name].numpy() for chunk in chunks])[order]
                digest.update(name.encode())
                digest.update(whole.reshape(-1).view(np.uint8).data)
    return digest.digest()
