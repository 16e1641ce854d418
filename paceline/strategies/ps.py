"""Parameter servers, synchronous: workers meet at servers at every step, which add up and run the optimizer.

The sum is all-reduce's, over the same tree, and the optimizer is the script's own, so the weights are the same bits.
A script sees nothing of it: `.grad` is the whole batch's gradient, fetched when it is looked at. If it is not, the
servers use what they have. If it is, the script may have changed it, and the servers get it back, each fragment from one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.embedding import tables_of
from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.carried import hyper, refuse_closure
from paceline.servers.clocks import RowsBehind, parse
from paceline.servers.coding import Coding
from paceline.servers.fragments import cut
from paceline.servers.holders import Directory, Holders
from paceline.servers.messages import ABSENT, BY_VALUE, Apply, Update, Value
from paceline.servers.peers import ServedPeers, Sums, stretch
from paceline.servers.stock import Stock
from paceline.state.replica import Replica
from paceline.strategies import split_codec
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Point, Scaled, Seat
from paceline.strategies.hooks import Hook
from paceline.strategies.rows import ServedRows, check_tables
from paceline.tensors.fetched import Fetch, Fetched
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers, TermEnded, Watch
from paceline.tensors.reduce import Outcome
from paceline.tensors.tree import Plan


class ParameterServers(AllReduce):
    mode = "ps"
    """As the servers are told it."""

    def __init__(self, text: str = "ps") -> None:
        super().__init__(text)
        self.waits: dict[int, float] = {}
        plain = split_codec(text)[0]
        mode = parse(plain)
        self._behind = mode.most if isinstance(mode, RowsBehind) else None
        """How many updates behind rows may be read, where that was said."""
        if self._behind is not None:
            self.mode = plain

    def reach(self, servers: Directory, watch: Watch, seat: Seat) -> None:
        self._watch = watch
        self._holders = Holders(servers)
        self._sums = Sums(lent=not self.may_lag)  # who goes on without its answers may change them
        self._stock: Stock | None = None
        self._count = 0
        """Optimizer steps so far."""
        self._sources: dict[int, int] = {}
        """For each parameter, at which point of the step it got its gradient."""
        self._pristine: dict[int, list[torch.Tensor]] = {}
        """The gradients of each point that was looked at, as they came."""
        self._flat = False
        self._seat = seat

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        self._tables = tables_of(replica.models)
        if self._behind is not None and not self._tables:
            rest = self.mode.partition("+")[0]
            raise UsageError(
                f"--strategy {self.mode} lets rows be read behind, and there is no paceline.SparseEmbedding in what was prepared, "
                f"whose rows these would be: pass --strategy {rest}"
            )
        check_tables(self._tables, replica, scaled)
        self._rows = ServedRows(self._tables, self._holders, self._behind)
        super().attach(replica, self._served_by(peers), mean, scaled)
        for number, optimizer in enumerate(replica.optimizers):
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            optimizer.register_step_post_hook(partial(self._after_step, number))
        for param in replica.params:
            param.register_hook(Hook(partial(_before_adding, param)))

    def _build(self) -> None:
        super()._build()
        layout = self._laid_out
        if self._stock is None:
            tables = [embedding.table for embedding in self._tables]
            self._stock = Stock(self._holders, self._replica, layout, self.mode, tables=tables, coding=self._coding())
            self._rows.begin(len(self._stock.fragments))
        elif cut(layout, len(self._replica.params)) != self._stock.fragments:
            raise UsageError(
                "a frozen parameter has become trainable, and the servers do not have it: with --strategy ps all that will "
                "ever be trained must be so when the loop begins"
            )

    @property
    def _laid_out(self) -> Layout:
        """Where all parameters and buffers lie."""
        return self._reducer.layout

    def _coding(self) -> Coding | None:
        """How gradients come to the servers, if not as they are."""
        return None

    @property
    def _at_servers(self) -> Stock:
        assert self._stock is not None
        return self._stock

    def _served_by(self, peers: Peers) -> ServedPeers:
        self._check = partial(self._check_all, peers)
        self._served = self._group(peers, self._holders, lambda: self._at_servers.fragments, self._sums, self._check)
        return self._served

    def _group(self, *arguments: Any) -> ServedPeers:
        return ServedPeers(*arguments)

    def _check_all(self, peers: Peers, seconds: float) -> None:
        for rank in range(peers.size):
            if rank != peers.rank:
                self._watch.check(seconds, rank)

    def meet(self, peers: Peers) -> None:
        at = self._served.at
        super().meet(self._served_by(peers))
        self._served.at = at

    # what the servers hold

    def lay(self) -> None:
        self._at_servers.lay(self._count)
        self._rows.lay()

    def begin(self) -> None:
        """The servers have everything. What they hold need not be what a newcomer was given: the script may have changed
        its weights since the last optimizer step."""
        self._at_servers.pull_all(self._count)
        self._at_servers.empty_optimizers()
        self._rows.laid()

    def capture(self) -> dict[str, Any]:
        return {"count": self._count, "rows": self._rows.capture()}

    def restore(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._rows.restore(state["rows"])

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self._at_servers.optimizers_filled(), self._rows.whole():
            yield

    def report(self) -> dict[str, Any]:
        return {**super().report(), **self._rows.facts()}

    # a step

    def begin_step(self) -> None:
        super().begin_step()
        self._sources, self._pristine, self._sums.divisors = {}, {}, {}

    def open(self, point: Point, plan: Plan, flat: bool) -> None:
        self._served.at, self._flat = (point.step, point.call), flat
        super().open(point, plan, flat)
        if not flat:
            self._rows.open()

    def fold(self, leaf: int) -> None:
        self._rows.fold(leaf, self._weight)
        super().fold(leaf)

    def drop(self) -> None:
        self._rows.drop()
        super().drop()

    def commit(self, point: Point, key: int, lanes: Sequence[int]) -> NDArray[np.int64]:
        self._rows.send()
        rows = super().commit(point, key, lanes)
        self._rows.met(self._sums.divisors[point.call])
        members = self._seat.view().members
        while self._served.waits:
            rank, seconds = self._served.waits.popitem()
            self.waits[members[rank]] = self.waits.get(members[rank], 0.0) + seconds
        return rows

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        self._served.at = (point.step, point.call)
        return super().carry_on(point, plan, kept)

    def _give_back(self, outcome: Outcome) -> None:
        params, (step, call) = self._replica.params, self._served.at
        fetch = Fetch(partial(self._bring, self._served, step, call, outcome.divisor))
        # What others than the script look at is there at once.
        cast = any(param.dtype != view.dtype for param, view in zip(params, outcome.views, strict=False))
        if cast or outcome.sparse or self._old or self._flat or self._reducer.staged:
            fetch.now()
        super()._give_back(outcome)
        for index, param in enumerate(params):
            if outcome.present[index] and index not in outcome.sparse:
                self._sources[index] = call
                if not fetch.done:
                    param.grad = Fetched.over(outcome.views[index], fetch)

    def _bring(self, served: ServedPeers, step: int, call: int, divisor: float) -> None:
        served.fetch(step, call, divisor)
        flats = self._sums.totals.of(call)
        self._reducer.bring(call, flats)
        self._pristine[call] = self._laid_out.views([flat.clone() for flat in flats])

    # the optimizer

    def _before_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        refuse_closure(args[1] if len(args) > 1 else kwargs.get("closure"))
        params, carried = self._replica.params, self._at_servers.carried[number]
        mine = [index for group in carried.groups for index in group.params if index is not None]
        grads = {index: params[index].grad for index in mine}
        sources = {index: self._source(index, grad) for index, grad in grads.items()}
        touched = [index for index in mine if not self._is_as_pulled(index)]
        self._count += 1
        step, divisors = self._served.at[0], self._sums.divisors
        update = Update(number, step, hyper(optimizer, carried), sources, divisors, touched)
        self._update = memoryview(msgspec.msgpack.encode(update))
        self._changes = self._what_comes(sources, grads, touched)
        self._grads = grads
        for index in mine:
            params[index].grad = None  # the optimizer itself finds nothing to do

    def _source(self, index: int, grad: torch.Tensor | None) -> int:
        if grad is None:
            return ABSENT
        call = self._sources.get(index)
        if call is None:
            return BY_VALUE
        if isinstance(grad, Fetched) and not grad.fetch.done:
            return call
        if call not in self._pristine:  # the script has looked at none of them, and put another one there
            return BY_VALUE
        came = self._pristine[call][index]
        return call if not grad.is_sparse and _same_bits(grad.cpu(), came.to(grad.dtype)) else BY_VALUE

    def _is_as_pulled(self, index: int) -> bool:
        """Whether the script has left this parameter alone since the last pull."""
        param, value = self._replica.params[index].detach(), self._at_servers.value_of[index]
        return _same_bits(param.to(value), value)

    def _what_comes(
        self, sources: dict[int, int], grads: dict[int, torch.Tensor | None], touched: list[int]
    ) -> dict[tuple[int, bool], memoryview]:
        """The bytes of each fragment that the script has changed something in: gradients, or weights (True)."""
        params, layout = self._replica.params, self._laid_out
        found: dict[tuple[int, bool], memoryview] = {}
        changed = {index for index, source in sources.items() if source == BY_VALUE}
        with torch.no_grad():
            if changed:
                flats = layout.allocate()
                views = layout.views(flats)
                for index in changed:
                    views[index].copy_(grads[index])  # type: ignore[arg-type]
                found |= {
                    (k, False): stretch(flats, self._at_servers.fragments[k]) for k in self._at_servers.having(changed)
                }
            for index in touched:
                self._at_servers.value_of[index].copy_(params[index])
        found |= {
            (k, True): stretch(self._at_servers.values, self._at_servers.fragments[k])
            for k in self._at_servers.having(set(touched))
        }
        return found

    def _send(self, everything: bool) -> list[Future[Reply]]:
        """Tell of the step. Each change of the script's comes from one worker; from all, where one may be gone."""
        holders, rank, size = self._holders, self._served.rank, self._served.size
        self._sent_everything = everything
        calls = [holders.out(mine, Apply(self._count, mine), self._update) for mine in holders.of_each()]
        for weights in (False, True):
            due = [k for k, of_weights in self._changes if of_weights == weights and (everything or k % size == rank)]
            for batch in holders.batches(due):
                body = [self._changes[k, weights] for k in batch]
                calls.append(holders.out(batch, Value(self._count, weights, batch), *body))
        return calls

    def _after_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        params = self._replica.params
        for index, grad in self._grads.items():
            params[index].grad = grad
        mine, first = list(self._at_servers.having(set(self._grads))), True

        def attempt() -> None:
            nonlocal first
            again, first = not first, False
            self._holders.wait(
                [*self._send(everything=again), *self._at_servers.pull(mine, self._count)], self._while_pulling
            )

        self._holders.through(attempt)
        self._at_servers.take_pulled(self._grads)
        with torch.no_grad():
            torch._foreach_copy_(
                [params[k].data for k in self._grads], [self._at_servers.value_of[k] for k in self._grads]
            )
        self._grads = {}
        self._rows.advance()

    def _while_pulling(self, seconds: float) -> None:
        """Another worker is gone, and with it perhaps what it should have sent: everybody has the same."""
        try:
            self._check(seconds)
        except TermEnded:
            if not self._sent_everything:
                self._holders.wait(self._send(everything=True))  # a refusal is seen: the pull may wait for just that

    def close(self) -> None:
        super().close()
        self._holders.close()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where both are NaN; and 0.0 is not -0.0."""
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[one.element_size()]
    return torch.equal(one.view(as_integers), other.view(as_integers))


def _before_adding(param: torch.Tensor, grad: torch.Tensor) -> None:
    """A backward of the script's own adds to what is there, and autograd looks at it without asking."""
    if isinstance(param.grad, Fetched):
        param.grad.fetch.now()
