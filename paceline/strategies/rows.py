"""A worker's side of tables whose rows lie at servers: what its forwards read, and what its shares bring.

    read       rows as of the newest update, for a forward; or some updates behind, where that is allowed (`most`)
    collect    gradients, as backward makes them
    fold       a share is over: all that it has collected is one contribution, named after the share
    send       before the workers meet, so that whoever comes out of the meeting knows that nobody's is missing
    met        what the sum at that point is divided by
    advance    with an optimizer's step: what was met since the last one moves the rows

All workers say the same `Advance`, and none waits for it: the rows that it reads next are those behind it. Where they may be
some updates behind, a server answers an `Advance` when its copies know of it, and takes it into the rows beside that.

Everything goes by the line that gradients leave by. On the other one a question may be waiting for a sum whose shares were
lost with a worker; whoever computes them anew has to read rows before it can be answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from paceline.embedding import Held, SparseEmbedding, Traffic
from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.clocks import behind
from paceline.servers.holders import Holders, MovedError
from paceline.servers.messages import Advance, Lay, RowPush, Rows, RowUpdate, State, Survey, Surveyed
from paceline.servers.row_optimizers import Block
from paceline.servers.tables import FRAGMENTS, NOTHING, Contribution, Touched, added, pack
from paceline.state.replica import Replica
from paceline.strategies.base import Scaled
from paceline.tensors.snapshot import Snapshot

Result = TypeVar("Result")


class _Brought(NamedTuple):
    """What one share brings: to each table that it has touched."""

    leaf: int
    rows: dict[int, Contribution]
    behind: dict[int, int]
    """By fragment, how many updates its reads have missed at most."""


class ServedRows:
    """`most`: how many updates behind rows may be read; None: none, and that is not counted either."""

    def __init__(self, embeddings: Sequence[SparseEmbedding], holders: Holders, most: int | None = None) -> None:
        self._embeddings, self._holders, self._first, self._most = embeddings, holders, 0, most
        self._homes = [_Home(self, number, each.dim) for number, each in enumerate(embeddings)]
        self._count = 0
        """Updates so far."""
        self._divisors: list[float] = []
        """Of the points that were met since."""
        self._brought: list[_Brought] = []
        """To the point in hand, and not sent yet."""
        self._behind: dict[int, int] = {}
        """What the share in hand has missed."""
        self._update = memoryview(b"")
        """The last one that this worker has said."""
        self._said: list[Future[Reply]] | None = []
        """As far as it may not have been heard; None: it is to be said again."""
        self._by = 0
        """How often something had moved then: see `Holders.moves`."""
        self._state: list[dict[str, Any]] | None = None
        """Of each fragment, from a checkpoint or for one."""

    @property
    def fragments(self) -> range:
        return range(self._first, self._first + FRAGMENTS * len(self._homes))

    def _of(self, table: int) -> range:
        return self.fragments[FRAGMENTS * table : FRAGMENTS * (table + 1)]

    def begin(self, first: int) -> None:
        """The fragments of rows are numbered from here on; from now on rows are read at servers."""
        self._first = first
        for embedding, home in zip(self._embeddings, self._homes, strict=True):
            embedding.home = home

    # shares

    def open(self) -> None:
        """A point begins, and with it a share."""
        for home in self._homes:
            home.begin_share(keep=True)

    def fold(self, leaf: int, weight: float) -> None:
        rows = {number: added(home.collected) for number, home in enumerate(self._homes) if home.collected and weight}
        if weight != 1.0:
            rows = {number: (touched, block * np.float32(weight)) for number, (touched, block) in rows.items()}
        if rows:
            self._brought.append(_Brought(leaf, rows, self._behind))
        self.drop()

    def drop(self) -> None:
        self._behind = {}
        for home in self._homes:
            home.begin_share(keep=home.known is not None)

    def send(self) -> None:
        """Everything that shares have brought is at the servers when this returns, and at their backups."""
        if self._brought or self._said != []:  # nobody is to wait at a meeting for one who waits for an update
            self._through(lambda: self._wait([call for brought in self._brought for call in self._push(brought)]))
        self._brought, self._behind = [], {}
        for home in self._homes:
            home.begin_share(keep=False)

    def met(self, divisor: float) -> None:
        self._divisors.append(divisor)

    def _push(self, brought: _Brought) -> Iterator[Future[Reply]]:
        parts: dict[int, list[memoryview]] = {}
        for table, (touched, block) in brought.rows.items():
            traffic = self._homes[table].traffic
            traffic.rows_pushed += len(block)
            for fragment, where in touched.by_fragment(self._of(table)):
                parts[fragment] = list(pack(touched.ids[where], block[where]))
                traffic.bytes += sum(map(len, parts[fragment]))
        for mine in self._holders.of_each(sorted(parts)):
            missed = {k: brought.behind[k] for k in mine if k in brought.behind}
            message = RowPush(self._count + 1, len(self._divisors), brought.leaf, mine, missed)
            yield self._holders.out(mine, message, *(part for k in mine for part in parts[k]))

    # updates

    def advance(self) -> None:
        if any(home.collected for home in self._homes):  # the only share of an only slot: nobody was met
            self.fold(0, 1.0)
            self.send()
            self.met(1.0)
        if not self._divisors or not self._homes:
            return
        update = RowUpdate(self._divisors, [embedding.optimizer_now() for embedding in self._embeddings])
        self._count, self._divisors = self._count + 1, []
        self._update, self._said = memoryview(msgspec.msgpack.encode(update)), None
        with suppress(MovedError):  # whoever reads next says it again
            self._advanced()

    def _advanced(self) -> list[Future[Reply]]:
        """The last update is said before anything else, and again where servers may have changed places since."""
        if self._said is None or (self._said and self._by != self._holders.moves):
            self._by = self._holders.moves
            self._said = [
                self._holders.out(mine, Advance(self._count, mine), self._update)
                for mine in self._holders.of_each(self.fragments if self._update else ())
            ]
        return self._said

    def _wait(self, calls: Sequence[Future[Reply]]) -> None:
        self._holders.wait([*self._advanced(), *calls])

    def _through(self, operation: Callable[[], Result]) -> Result:
        """With the last update said before the rest: what waits for it at a server holds up what is said behind."""

        def attempt() -> Result:
            try:
                self._advanced()
                result = operation()
            except MovedError:
                self._said = None
                raise
            self._said = []
            return result

        return self._holders.through(attempt)

    # reading

    @property
    def lags(self) -> bool:
        """Whether what is read for training may miss some updates."""
        return bool(self._most)

    def read(self, table: int, touched: Touched, newest: bool) -> Block:
        most = 0 if newest else self._most or 0
        home = self._homes[table]
        rows = np.empty((len(touched.ids), home.dim), dtype=np.float32)
        where = dict(touched.by_fragment(self._of(table)))
        home.traffic.rows_read += len(rows)
        home.traffic.bytes += touched.ids.nbytes + rows.nbytes

        def attempt() -> None:
            asked = []
            for mine in self._holders.of_each(where):
                ids = [part for k in mine for part in pack(touched.ids[where[k]])]
                asked.append((mine, self._holders.out(mine, Rows(self._count, mine, most), *ids)))
            self._wait([future for _, future in asked])
            for mine, future in asked:
                found, at = np.frombuffer(future.result().body, dtype=np.float32).reshape(-1, home.dim), 0
                for k in mine:
                    into = rows[where[k]]
                    into[:] = found[at : at + len(into)]
                    at += len(into)
                if self._most is not None and not newest:
                    self._note(mine, future.result().message.versions)

        if where:
            self._through(attempt)
        return rows

    def _note(self, fragments: Sequence[int], versions: Sequence[int]) -> None:
        for k, version in zip(fragments, versions, strict=True):
            self._behind[k] = max(self._behind.get(k, 0), behind(self._count, version))

    def survey(self, table: int) -> Held:
        found = self._survey(self._of(table), hashed=False).values()
        return Held(*(sum(each) for each in zip(*((k.rows, k.nbytes, k.moved) for k in found), strict=True)))

    def facts(self) -> dict[str, Any]:
        """The hash is of all rows, with their optimizers' state: the same for the same rows, wherever they lie."""
        if not self._homes:
            return {}
        found = self._survey(self.fragments, hashed=True)
        digest = hashlib.sha256(b"".join(found[k].sha256 for k in self.fragments)).hexdigest()
        facts = {"rows": sum(each.rows for each in found.values()), "rows_sha256": digest}
        return facts if self._most is None else {**facts, "staleness": _all_staleness(found.values())}

    def _survey(self, fragments: range, hashed: bool) -> dict[int, Surveyed]:
        found: dict[int, Surveyed] = {}

        def attempt() -> None:
            holders = self._holders
            asked = [
                (mine, holders.out(mine, Survey(self._count, mine, hashed))) for mine in holders.of_each(fragments)
            ]
            self._wait([future for _, future in asked])
            for mine, future in asked:
                found.update(zip(mine, msgspec.msgpack.decode(future.result().body, type=list[Surveyed]), strict=True))

        self._through(attempt)
        return found

    # what survives

    def lay(self) -> None:
        """Give the servers the rows of a checkpoint, or none."""
        seeds = [embedding.seed_now() for embedding in self._embeddings for _ in range(FRAGMENTS)]
        states = self._state or [{"seed": seed, "chunks": [], "staleness": {}} for seed in seeds]

        def attempt() -> None:
            for fragment, state in zip(self.fragments, states, strict=True):
                body = memoryview(Snapshot(state).packed())
                self._holders.wait([self._holders.out([fragment], Lay([fragment], self._count), body)])

        self._holders.through(attempt)

    def laid(self) -> None:
        self._state = None

    def capture(self) -> dict[str, Any]:
        kinds = [embedding.table.kind for embedding in self._embeddings]
        rates = [float(embedding.lr) for embedding in self._embeddings]
        return {
            "count": self._count,
            "divisors": self._divisors,
            "kinds": kinds,
            "rates": rates,
            "fragments": self._state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for embedding, rate in zip(self._embeddings, state["rates"], strict=True):
            embedding.lr = rate
        for number, (embedding, theirs) in enumerate(zip(self._embeddings, state["kinds"], strict=True)):
            if embedding.table.kind != theirs:
                raise UsageError(
                    f"SparseEmbedding {number} is of {embedding.table.kind}; it was of {theirs} when the state was written"
                )
        self._count, self._divisors, self._state = state["count"], state["divisors"], state["fragments"]
        if self._state is not None:
            self._divisors = []  # a checkpoint has no gradients

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, `capture` has the rows."""
        self._state = [self._state_of(fragment) for fragment in self.fragments]
        yield
        self._state = None

    def _state_of(self, fragment: int) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            call = self._holders.out([fragment], State(fragment))
            self._wait([call])
            tree: dict[str, Any] = Snapshot.read(call.result().body).tree
            return tree

        return self._through(attempt)


def _all_staleness(found: Iterable[Surveyed]) -> dict[str, int]:
    counts: dict[int, int] = {}
    for missed, count in (each for surveyed in found for each in surveyed.staleness.items()):
        counts[missed] = counts.get(missed, 0) + count
    return {str(missed): counts[missed] for missed in sorted(counts)}


def check_tables(tables: Sequence[SparseEmbedding], replica: Replica, scaled: Scaled | None) -> None:
    if tables and not replica.optimizers:
        raise UsageError(
            "a SparseEmbedding's rows move when an optimizer steps, and none was given to run.prepare(): give it the one of "
            "the dense part"
        )
    if tables and scaled:
        raise UsageError("a SparseEmbedding cannot be trained with precision fp16: use bf16, which needs no scaling")


class _Home:
    """One table, as its embedding sees it."""

    def __init__(self, served: ServedRows, number: int, dim: int) -> None:
        self._served, self._number, self.dim = served, number, dim
        self.traffic = Traffic()
        self.collected: list[Contribution] = []
        self.known: Contribution | None = None
        """What was read in the share in hand: it is not read again. None: outside of shares."""

    def begin_share(self, keep: bool) -> None:
        self.collected = []
        self.known = (NOTHING, np.empty((0, self.dim), dtype=np.float32)) if keep else None

    def read(self, touched: Touched, newest: bool) -> Block:
        if self.known is None or (newest and self._served.lags):
            return self._served.read(self._number, touched, newest)
        at = touched.find(self.known[0])
        if (at < 0).any():
            fresh = touched.take(at < 0)
            rows = self._served.read(self._number, fresh, newest)
            self.known = added([self.known, (fresh, rows)])
            if len(fresh.ids) == len(touched.ids):
                return rows
            at = touched.find(self.known[0])
        return self.known[1][at]

    def push(self, touched: Touched, gradients: Block) -> None:
        self.collected.append((touched, gradients))

    def held(self) -> Held:
        return self._served.survey(self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Home:
        """A copy of the model reads the same rows."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "the rows of a SparseEmbedding lie at servers and cannot be pickled with the model: save its state_dict(), or "
            "have the run write checkpoints"
        )
