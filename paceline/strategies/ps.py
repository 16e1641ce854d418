"""Parameter servers, synchronous: workers meet at servers at every step, which add up and run the optimizer.

The sum is all-reduce's, over the same tree, and the optimizer is the script's own, so the weights are the same bits.
A script sees nothing of it: `.grad` is the whole batch's gradient, fetched when it is looked at. If it is not, the
servers use what they have. If it is, the script may have changed it, and the servers get it back, each fragment from one
worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from paceline.hooks import Hook
from paceline.replica import Replica, load_optimizer
from paceline.servers.calling import Reply
from paceline.servers.carried import Carried, describe, hyper, refuse_closure
from paceline.servers.fragments import Fragment, cut
from paceline.servers.holders import Directory, Holders
from paceline.servers.messages import ABSENT, BY_VALUE, Apply, Drawing, Lay, Pull, State, Update, Value
from paceline.servers.optimizers import cut as cut_state
from paceline.servers.optimizers import join
from paceline.servers.peers import ServedPeers, Sums, stretch
from paceline.servers.pieces import Piece
from paceline.servers.tables import NOMINAL_BYTES
from paceline.state.snapshot import Snapshot
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Point, Scaled
from paceline.strategies.rows import ServedRows
from paceline.tensors.fetched import Fetch, Fetched
from paceline.tensors.peers import Peers, TermEnded, Watch
from paceline.tensors.reduce import Outcome
from paceline.tensors.tree import Plan


class ParameterServers(AllReduce):
    at_servers = True

    def reach(self, servers: Directory, watch: Watch) -> None:
        self._watch = watch
        self._holders = Holders(servers)
        self._sums = Sums()
        self._fragments: tuple[Fragment, ...] = ()
        self._count = 0
        """Optimizer steps so far."""
        self._sources: dict[int, int] = {}
        """For each parameter, at which point of the step it got its gradient."""
        self._pristine: dict[int, list[torch.Tensor]] = {}
        """The gradients of each point that was looked at, as they came."""
        self._flat = False

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        self._tables = tables_of(replica.models)
        _check_tables(bool(self._tables), replica, scaled)
        self._rows = ServedRows(self._tables, self._holders)
        super().attach(replica, self._served_by(peers), mean, scaled)
        for number, optimizer in enumerate(replica.optimizers):
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            optimizer.register_step_post_hook(partial(self._after_step, number))
        for param in replica.params:
            param.register_hook(Hook(partial(_before_adding, param)))

    def _build(self) -> None:
        super()._build()
        layout, params = self._reducer.layout, self._replica.params
        fragments = cut(layout, len(params))
        if self._fragments and fragments != self._fragments:
            raise UsageError(
                "a frozen parameter has become trainable, and the servers do not have it: with --strategy ps all that will "
                "ever be trained must be so when the loop begins"
            )
        if self._fragments:
            return
        self._fragments = fragments
        self._values = layout.allocate()
        """What the servers hold, as of the last pull."""
        self._value_of = layout.views(self._values)[: len(params)]
        optimizers = self._replica.optimizers
        self._carried: list[Carried] = [describe(optimizer, params) for optimizer in optimizers]
        _refuse_shared(self._carried)
        # With several optimizers a fragment may have the next one's step in it already: then that is not ours to take.
        self._incoming = self._values if len(optimizers) < 2 else layout.allocate()
        self._incoming_of = layout.views(self._incoming)[: len(params)]
        dtypes = [str(dtype) for dtype, _ in layout.flats]
        sizes = [fragment.nbytes(layout) for fragment in fragments]
        self._rows.begin(len(fragments))
        sizes += [NOMINAL_BYTES] * len(self._rows.fragments)
        tables = [embedding.table for embedding in self._tables]
        self._holders.place(Drawing(list(fragments), dtypes, self._carried, tables), sizes)

    def _served_by(self, peers: Peers) -> ServedPeers:
        def check(seconds: float) -> None:
            for rank in range(peers.size):
                if rank != peers.rank:
                    self._watch.check(seconds, rank)

        self._check = check
        self._served = ServedPeers(peers, self._holders, lambda: self._fragments, self._sums, check)
        return self._served

    def meet(self, peers: Peers) -> None:
        at = self._served.at
        super().meet(self._served_by(peers))
        self._served.at = at

    # what the servers hold

    def lay(self) -> None:
        """Give them the values and the optimizers' state."""
        states = [optimizer.state_dict() for optimizer in self._replica.optimizers]
        self._note_values()

        def attempt() -> None:
            calls = []
            for number, fragment in enumerate(self._fragments):
                pieces = [self._pieces_of(carried, fragment) for carried in self._carried]
                found = [cut_state(*each) for each in zip(states, self._carried, pieces, strict=True)]
                state = [] if fragment.buffers else [memoryview(Snapshot(found).packed())]
                calls.append(self._holders.out([number], Lay([number], self._count), self._held(number), *state))
            self._holders.wait(calls)

        self._holders.through(attempt)
        self._rows.lay()

    def begin(self) -> None:
        """The servers have everything; workers keep no state of an optimizer. What the servers hold need not be what a
        newcomer was given: the script may have changed its weights since the last optimizer step."""
        everything = range(len(self._fragments))
        self._holders.through(lambda: self._holders.wait(self._pull(everything)))
        self._take_pulled(range(len(self._value_of)))
        for optimizer in self._replica.optimizers:
            optimizer.state.clear()
        self._rows.laid()

    def _note_values(self) -> None:
        with torch.no_grad():
            for value, param in zip(self._value_of, self._replica.params, strict=True):
                value.copy_(param)

    @staticmethod
    def _pieces_of(carried: Carried, fragment: Fragment) -> list[Piece]:
        mine = {param for group in carried.groups for param in group.params}
        return [piece for piece in fragment.pieces if piece.param in mine and not fragment.buffers]

    def capture(self) -> dict[str, Any]:
        return {"count": self._count, "rows": self._rows.capture()}

    def restore(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        self._rows.restore(state["rows"])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the script's optimizers have their state, as if they had run here."""
        held: list[list[tuple[Piece, dict[str, Any]]]] = [[] for _ in self._carried]
        for number, fragment in enumerate(self._fragments):
            if not fragment.buffers:
                for known, carried, states in zip(held, self._carried, self._states_of(number), strict=True):
                    known.extend(zip(self._pieces_of(carried, fragment), states, strict=True))
        optimizers = self._replica.optimizers
        for optimizer, carried, mine in zip(optimizers, self._carried, held, strict=True):
            load_optimizer(optimizer, join(carried, hyper(optimizer, carried), mine))
        with self._rows.whole():
            yield
        for optimizer in optimizers:
            optimizer.state.clear()

    def facts(self) -> dict[str, Any]:
        return self._rows.facts()

    def _states_of(self, fragment: int) -> list[list[dict[str, Any]]]:
        holders = self._holders
        (reply,) = holders.through(lambda: holders.wait([holders.back([fragment], State(fragment))]))
        states: list[list[dict[str, Any]]] = Snapshot.read(reply.body).tree
        return states

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
        return rows

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        self._served.at = (point.step, point.call)
        return super().carry_on(point, plan, kept)

    def _give_back(self, outcome: Outcome) -> None:
        params, (step, call) = self._replica.params, self._served.at
        served, divisor = self._served, outcome.divisor
        fetch = Fetch(lambda: self._bring(served, step, call, divisor))
        # What others than the script look at is there at once.
        cast = any(param.dtype != view.dtype for param, view in zip(params, outcome.views, strict=False))
        if cast or outcome.sparse or self._old or self._flat or self._replica.device.type != "cpu":
            fetch.now()
        super()._give_back(outcome)
        for index, param in enumerate(params):
            if outcome.present[index] and index not in outcome.sparse:
                self._sources[index] = call
                if not fetch.done:
                    param.grad = Fetched.over(outcome.views[index], fetch)

    def _bring(self, served: ServedPeers, step: int, call: int, divisor: float) -> None:
        served.fetch(step, call, divisor)
        layout = self._reducer.layout
        self._pristine[call] = layout.views([flat.clone() for flat in self._sums.totals.of(call)])

    # the optimizer

    def _before_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        refuse_closure(args[1] if len(args) > 1 else kwargs.get("closure"))
        params, carried = self._replica.params, self._carried[number]
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
        came = self._pristine[call][index]
        return call if not grad.is_sparse and _same_bits(grad.cpu(), came.to(grad.dtype)) else BY_VALUE

    def _is_as_pulled(self, index: int) -> bool:
        """Whether the script has left this parameter alone since the last pull."""
        param, value = self._replica.params[index].detach(), self._value_of[index]
        return _same_bits(param.to(value.dtype), value)

    def _what_comes(
        self, sources: dict[int, int], grads: dict[int, torch.Tensor | None], touched: list[int]
    ) -> dict[tuple[int, bool], memoryview]:
        """The bytes of each fragment that the script has changed something in: gradients, or weights (True)."""
        params, layout = self._replica.params, self._reducer.layout
        found: dict[tuple[int, bool], memoryview] = {}
        changed = {index for index, source in sources.items() if source == BY_VALUE}
        with torch.no_grad():
            if changed:
                flats = layout.allocate()
                views = layout.views(flats)
                for index in changed:
                    views[index].copy_(grads[index])  # type: ignore[arg-type]
                found |= {(k, False): stretch(flats, self._fragments[k]) for k in self._with(changed)}
            for index in touched:
                self._value_of[index].copy_(params[index])
        found |= {(k, True): stretch(self._values, self._fragments[k]) for k in self._with(set(touched))}
        return found

    def _with(self, params: set[int]) -> Iterator[int]:
        """Fragments that hold any of these parameters."""
        for number, fragment in enumerate(self._fragments):
            if not fragment.buffers and any(piece.param in params for piece in fragment.pieces):
                yield number

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
        mine, first = list(self._with(set(self._grads))), True

        def attempt() -> None:
            nonlocal first
            again, first = not first, False
            self._holders.wait([*self._send(everything=again), *self._pull(mine)], self._while_pulling)

        self._holders.through(attempt)
        self._take_pulled(self._grads)
        with torch.no_grad():
            torch._foreach_copy_([params[k].data for k in self._grads], [self._value_of[k] for k in self._grads])
        self._grads = {}
        self._rows.advance()

    def _pull(self, fragments: Iterable[int]) -> list[Future[Reply]]:
        return self._holders.begin_fetch(
            fragments, lambda batch: Pull(self._count, batch), lambda k: stretch(self._incoming, self._fragments[k])
        )

    def _take_pulled(self, params: Iterable[int]) -> None:
        self._holders.end_fetch()
        if self._incoming is not self._values:
            for index in params:
                self._value_of[index].copy_(self._incoming_of[index])

    def _held(self, number: int) -> memoryview:
        """A fragment's bytes, as of the last pull."""
        return stretch(self._values, self._fragments[number])

    def _while_pulling(self, seconds: float) -> None:
        """Another worker is gone, and with it perhaps what it should have sent: everybody has the same."""
        try:
            self._check(seconds)
        except TermEnded:
            if not self._sent_everything:
                self._send(everything=True)

    def close(self) -> None:
        super().close()
        self._holders.close()


def _check_tables(there: bool, replica: Replica, scaled: Scaled | None) -> None:
    if there and not replica.optimizers:
        raise UsageError(
            "a SparseEmbedding's rows move when an optimizer steps, and none was given to run.prepare(): give it the one of "
            "the dense part"
        )
    if there and scaled:
        raise UsageError("a SparseEmbedding cannot be trained with precision fp16: use bf16, which needs no scaling")


def _refuse_shared(carried: Sequence[Carried]) -> None:
    held = [param for each in carried for group in each.groups for param in group.params if param is not None]
    if len(set(held)) < len(held):
        raise UsageError(
            "a parameter is in two optimizers: servers cannot tell whose turn it is; give each its own parameters"
        )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where both are NaN; and 0.0 is not -0.0."""
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[one.element_size()]
    return torch.equal(one.view(as_integers), other.view(as_integers))


def _before_adding(param: torch.Tensor, grad: torch.Tensor) -> None:
    """A backward of the script's own adds to what is there, and autograd looks at it without asking."""
    if isinstance(param.grad, Fetched):
        param.grad.fetch.now()
