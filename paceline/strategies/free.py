"""Parameter servers for workers that run at their own pace: async, ssp:s and dssp:low,high.

A worker takes one micro-batch after the other, each one slot's share of some step, from the register (see
`servers.register`). An optimizer step of its script is a push: the gradients are staged at all servers, then counted in the
register, then applied, in the order in which pushes were counted. The next micro-batch begins, once the mode lets it, with
the weights that the servers have then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.carried import hyper, plain, refuse_closure
from paceline.servers.coding import Coding
from paceline.servers.delays import split
from paceline.servers.messages import (
    ABSENT,
    BY_VALUE,
    Apply,
    Number,
    Push,
    Stage,
    Tail,
    Turned,
    Unheard,
    Update,
)
from paceline.servers.peers import stretch
from paceline.servers.register import AGAIN
from paceline.servers.stock import Stock
from paceline.state.replica import Replica
from paceline.strategies.base import Scaled
from paceline.strategies.registered import Registered
from paceline.tensors.peers import Peers

_LOOK_AFTER_S, _PATIENCE_S = 0.05, 0.25
"""A push that was counted and is not applied: whoever made it may be dead, which is seen, or frozen. Servers that are slow are
not told all over again of what is on its way to them: each worker that waits would tell them, and make them slower."""


class FreeRunning(Registered):
    same_bits = False

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self._clock, self._delays = split(mode)
        self._own = self._heard = 0
        """This worker's pushes, and those of all that all servers have applied."""
        self._number, self._call, self._weight = -1, 0, 1.0
        """The micro-batch in hand, which of its optimizer steps comes next, and which part of a step it is."""
        self._pulled = False
        self._staleness: dict[int, int] = {}

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        super().attach(replica, peers, mean, scaled)
        for number, optimizer in enumerate(replica.optimizers):
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            optimizer.register_step_post_hook(partial(self._after_step, number))

    def _stocked(self) -> Stock:
        return Stock(self._holders, self._replica, self._layout, self._clock, self._seat.slots, coding=self._coding())

    def _coding(self) -> Coding | None:
        """How gradients come to the servers, if not as they are."""
        return None

    # a stretch

    def take(self, number: int, weight: float, count: int) -> None:
        """This micro-batch is in hand now; the weights for it have so many pushes, or more."""
        self._number, self._call, self._weight = number, 0, weight if self._mean else 1.0
        start = time.perf_counter()
        self.pull(count)
        self._spent_s += time.perf_counter() - start

    def end_stretch(self, turned: Turned) -> None:
        self._number, self._staleness = -1, turned.staleness
        super().end_stretch(turned)

    def report(self) -> dict[str, Any]:
        return {"staleness": {str(k): count for k, count in sorted(self._staleness.items())}}

    @property
    def has_pushed(self) -> bool:
        """Whether an optimizer step was made for the micro-batch in hand."""
        return self._call > 0

    # a push

    def _before_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        refuse_closure(args[1] if len(args) > 1 else kwargs.get("closure"))
        params, carried = self._replica.params, self._stock.carried[number]
        mine = [index for group in carried.groups for index in group.params if index is not None]
        self._grads = {index: params[index].grad for index in mine}
        for index in mine:
            params[index].grad = None  # the optimizer itself finds nothing to do

    def _refuse_touched(self) -> None:
        for param, value in zip(self._replica.params, self._stock.value_of, strict=False):
            if not torch.equal(param.detach().to(value), value) and not value.isnan().any():
                raise UsageError(
                    f"the script has changed a weight of shape {tuple(param.shape)} by itself: with --strategy {self._text} "
                    "weights are the servers', and change by optimizer steps alone; use --strategy ps"
                )

    def _after_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        start = time.perf_counter()
        self._push(number, optimizer)
        self._spent_s += time.perf_counter() - start

    def _push(self, number: int, optimizer: Any) -> None:
        grads, self._grads = self._grads, {}
        for index, grad in grads.items():
            self._replica.params[index].grad = grad
        moved = self._lay_out(grads)
        if self._delays:
            self._make_up_for_delays([index for index, grad in grads.items() if grad is not None])
        self._own += 1
        push = (self._seat.worker, self._own)
        sources = {index: ABSENT if grad is None else BY_VALUE for index, grad in grads.items()}
        values = [
            {**changed, "lr": _times(plain(group["lr"]), self._weight)}
            for changed, group in zip(
                hyper(optimizer, self._stock.carried[number]), optimizer.param_groups, strict=True
            )
        ]
        update = memoryview(msgspec.msgpack.encode(Update(number, 0, values, sources, {}, [], push, moved, self._gone)))
        params = {index for index, grad in grads.items() if grad is not None}
        self._encode(params)
        self._holders.through(partial(self._stage, params, moved))
        counted: Number = self._ask(Push(*push, self._number, self._call, self._heard), update).message
        self._decided(counted.count != AGAIN)
        self._call += 1
        if counted.count != AGAIN:
            # Nobody waits for that, nor looks whether it was refused: who pulls sees to it.
            self._holders.through(partial(self._apply, counted.count, update))
        if len(self._replica.optimizers) > 1:  # the next one computes with what this one has done
            self.pull(max(counted.count, self._heard))

    def _lay_out(self, grads: dict[int, torch.Tensor | None]) -> bool:
        """Gradients as they are pushed; whether buffers have moved, too."""
        count = len(self._replica.params)
        with torch.no_grad():
            for index, grad in grads.items():
                if grad is not None:
                    self._out_of[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            moves = self._buffers.take()
            moved = any(move is not None for move in moves)
            for view, move in zip(self._out_of[count:], moves, strict=True):
                view.zero_() if move is None else view.copy_(move)
        return moved

    def _make_up_for_delays(self, params: Sequence[int]) -> None:
        tail: Tail = self._ask(Unheard(self._count)).message
        factor = self._delays.factor(tail.count - self._count)
        now = self._stock.look(self._count) if self._delays.compensation else self._stock.value_of
        for index in params:
            gradient = self._out_of[index]
            self._delays.compensate(gradient, now[index], self._stock.value_of[index])
            gradient.mul_(factor)

    def _stage(self, params: set[int], moved: bool) -> None:
        fragments = self._stock.fragments
        due = [*self._stock.having(params), *(k for k, fragment in enumerate(fragments) if fragment.buffers and moved)]
        self._holders.wait(self._staging(due), self._check)

    def _staging(self, due: Sequence[int]) -> Iterator[Future[Reply]]:
        """These fragments of what is pushed, on their way."""
        for batch in self._holders.batches(due):
            body = [stretch(self._out, self._stock.fragments[k]) for k in batch]
            yield self._holders.out(batch, Stage(self._seat.worker, self._own, batch), *body)

    def _encode(self, params: set[int]) -> None:
        """The gradients of these parameters are laid out as they will be pushed."""

    def _decided(self, counted: bool) -> None:
        """The push in hand is over, and counts or not."""

    def _apply(self, count: int, update: memoryview) -> list[Future[Reply]]:
        """All servers are told; their answers."""
        each = ([fragment for fragment in mine if fragment != self._place] for mine in self._holders.of_each())
        return [self._holders.out(held, Apply(count, held), update) for held in each if held]

    # a pull

    def pull(self, count: int) -> None:
        if self._pulled:
            self._refuse_touched()
        self._pulled = True
        super().pull(count)
        self._heard = count

    def _while_pulling(self) -> Callable[[float], None]:
        due = _LOOK_AFTER_S

        def check(seconds: float) -> None:
            nonlocal due
            self._check(seconds)
            if seconds > due:
                due = seconds + min(seconds, 1.0)
                self._tell_unheard(self._seat.lost() if seconds < _PATIENCE_S else None)

        return check

    def _tell_unheard(self, by: Sequence[int] | None) -> None:
        """Somebody's push was counted, and some server has not heard of it: from now on it has. Only of these workers' pushes,
        if they are named.

        One that does not lead all of these fragments any more refuses it, for all of them. The pull would not be told: it may
        wait for one that is still led there, and for just this push. So a refusal is looked at: what is pulled is where the
        next layout says, and so is whom to tell."""
        (reply,) = self._holders.wait([self._holders.out([self._place], Unheard(self._heard))])
        tail: Tail = reply.message
        told: list[Future[Reply]] = []
        for entry in tail.entries:
            if by is None or msgspec.msgpack.decode(entry.update, type=Update).push[0] in by:
                told += self._apply(entry.count, memoryview(entry.update))
        self._holders.wait(told, self._check)


def _times(rate: Any, part: float) -> Any:
    """A learning rate, as plain values, for a part of a step."""
    return {**rate, "value": rate["value"] * part} if isinstance(rate, dict) else rate * part
