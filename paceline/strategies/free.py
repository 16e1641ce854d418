"""Parameter servers for workers that run at their own pace: async, ssp:s and dssp:low,high.

A worker takes one micro-batch after the other, each one slot's share of some step, from the register (see
`servers.register`). An optimizer step of its script is a push: the gradients are staged at all servers, then counted in the
register, then applied, in the order in which pushes were counted. The next micro-batch begins, once the mode lets it, with
the weights that the servers have then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.errors import UsageError
from paceline.replica import Replica
from paceline.servers.carried import hyper, plain, refuse_closure
from paceline.servers.delays import split
from paceline.servers.holders import Directory, Holders
from paceline.servers.messages import (
    ABSENT,
    BY_VALUE,
    Apply,
    Begin,
    Begun,
    Enter,
    Hold,
    Lost,
    Notes,
    Number,
    Push,
    Stage,
    Tail,
    Turn,
    Turned,
    Unheard,
    Update,
)
from paceline.servers.peers import stretch
from paceline.servers.register import AGAIN, Delivered, Register
from paceline.servers.stock import Stock
from paceline.strategies.base import Scaled, Seat
from paceline.strategies.buffers import Buffers
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers, Watch

_TELL_EVERY_S = 0.2
_UNHEARD_AFTER_S = 0.03
"""A push that was counted so long ago and is not applied: whoever made it may be dead, or frozen."""


class FreeRunning:
    same_bits = False

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._clock, self._delays = split(mode)
        self._gone: list[int] = []
        """Workers of whom nothing more is counted."""
        self._count = self._own = self._heard = 0
        """Pushes that this worker has seen the result of; its own; and those that all servers have applied."""
        self._stretch = 0
        self._register_at_rest = b""
        self._number, self._call, self._weight = -1, 0, 1.0
        """The micro-batch in hand, which of its optimizer steps comes next, and which part of a step it is."""
        """The sum over the pieces of the micro-batch in hand, of each parameter."""
        self._pulled = False
        self._told_s = self._spent_s = 0.0
        self._staleness: dict[int, int] = {}

    def reach(self, servers: Directory, watch: Watch, seat: Seat) -> None:
        self._seat, self._holders = seat, Holders(servers)

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        if scaled is not None:
            raise UsageError(
                f"--precision fp16 with --strategy {self._mode}: a gradient that overflows must be dropped by all workers "
                "together, and these do nothing together; use --precision bf16"
            )
        self._replica, self._mean = replica, mean
        self._buffers = Buffers(replica)
        tensors = [*replica.params, *replica.buffers]
        self._layout = Layout.of(tensors, len(replica.params))
        self._stock = Stock(self._holders, replica, self._layout, self._clock, self._seat.slots)
        self._pushed = self._layout.allocate(lent=True)
        self._pushed_of = self._layout.views(self._pushed)
        for number, optimizer in enumerate(replica.optimizers):
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            optimizer.register_step_post_hook(partial(self._after_step, number))

    def meet(self, peers: Peers) -> None:
        return

    # what the servers hold

    def lay(self) -> None:
        register = self._register_at_rest or Register(self._seat.slots, count=self._count).encode()
        self._stock.lay(self._count, register)

    def begin(self) -> None:
        self.pull(self._count)
        self._stock.empty_optimizers()

    def capture(self) -> dict[str, Any]:
        return {"count": self._count, "stretch": self._stretch, "register": self._register_at_rest}

    def restore(self, state: dict[str, Any]) -> None:
        self._count, self._stretch, self._register_at_rest = state["count"], state["stretch"], state["register"]

    @contextmanager
    def whole(self) -> Iterator[Register]:
        """Nobody's push is counted meanwhile: all fragments are of one moment, and so is the register."""
        reply = self._ask(Hold(self._seat.worker, yes=True))
        try:
            self.pull(reply.message.count)
            register = Register.decode(reply.body)
            self._register_at_rest = register.at_rest().encode()
            with self._stock.optimizers_filled():
                yield register
        finally:
            self._register_at_rest = b""
            self._ask(Hold(self._seat.worker, yes=False))

    # a stretch

    def begin_stretch(self, total: int, epoch: int, loader: int, notes: Callable[[], bytearray]) -> Begun:
        begun: Begun = self._ask(Begin(self._seat.worker, self._stretch, total, epoch, loader)).message
        if not begun.noted:
            self._ask(Notes(self._stretch, [self._place]), memoryview(notes()))
        return begun

    def enter(self) -> memoryview:
        """In the middle of a stretch: what a newcomer needs to know."""
        return memoryview(self._ask(Enter(self._seat.worker)).body)

    def turn(
        self, want: int, delivered: Sequence[Delivered], stop: int = 0, written: int = -1, leaves: bool = False
    ) -> Turned:
        """What this worker has in hand next. It has delivered these, and wishes to stop, if so."""
        turn = Turn(self._seat.worker, self._stretch, want, list(delivered), stop, written, leaves)
        turned: Turned = self._ask(turn).message
        self._gone = turned.gone
        return turned

    def take(self, number: int, weight: float, count: int) -> None:
        """This micro-batch is in hand now; the weights for it have so many pushes, or more."""
        self._number, self._call, self._weight = number, 0, weight if self._mean else 1.0
        start = time.perf_counter()
        self.pull(count)
        self._spent_s += time.perf_counter() - start

    def end_stretch(self, turned: Turned) -> None:
        """Everybody's weights are the same now."""
        self._number, self._staleness = -1, turned.staleness
        self.pull(turned.count)
        if not turned.stop:
            self._stretch += 1

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
                    f"the script has changed a weight of shape {tuple(param.shape)} by itself: with --strategy {self._mode} "
                    "weights are the servers', and change by optimizer steps alone; use --strategy ps"
                )

    def spent_s(self) -> float:
        """Seconds spent on pushes and pulls since this was asked last."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

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
        self._holders.through(partial(self._stage, {index for index in grads if grads[index] is not None}, moved))
        counted: Number = self._ask(Push(*push, self._number, self._call, self._heard), update).message
        self._call += 1
        if counted.count != AGAIN:
            # Nobody waits for that: who pulls sees to it.
            self._holders.through(partial(self._apply, counted.count, update))
        if len(self._replica.optimizers) > 1:  # the next one computes with what this one has done
            self.pull(max(counted.count, self._heard))

    def _lay_out(self, grads: dict[int, torch.Tensor | None]) -> bool:
        """Gradients as they are pushed; whether buffers have moved, too."""
        count = len(self._replica.params)
        with torch.no_grad():
            for index, grad in grads.items():
                if grad is not None:
                    self._pushed_of[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            moves = self._buffers.take()
            moved = any(move is not None for move in moves)
            for view, move in zip(self._pushed_of[count:], moves, strict=True):
                view.zero_() if move is None else view.copy_(move)
        return moved

    def _make_up_for_delays(self, params: Sequence[int]) -> None:
        tail: Tail = self._ask(Unheard(self._count)).message
        factor = self._delays.factor(tail.count - self._count)
        now = self._stock.look(self._count) if self._delays.compensation else self._stock.value_of
        for index in params:
            gradient = self._pushed_of[index]
            self._delays.compensate(gradient, now[index], self._stock.value_of[index])
            gradient.mul_(factor)

    def _stage(self, params: set[int], moved: bool) -> None:
        fragments = self._stock.fragments
        due = [*self._stock.having(params), *(k for k, fragment in enumerate(fragments) if fragment.buffers and moved)]
        calls = []
        for batch in self._holders.batches(due):
            body = [stretch(self._pushed, fragments[k]) for k in batch]
            calls.append(self._holders.out(batch, Stage(self._seat.worker, self._own, batch), *body))
        self._holders.wait(calls, self._check)

    def _apply(self, count: int, update: memoryview) -> None:
        for mine in self._holders.of_each():
            held = [fragment for fragment in mine if fragment != self._place]
            if held:
                self._holders.out(held, Apply(count, held), update)

    # a pull

    def pull(self, count: int) -> None:
        """Go on with the weights after so many pushes, or more."""
        stock, told = self._stock, 0.0

        def check(seconds: float) -> None:
            nonlocal told
            self._check(seconds)
            if seconds - told > _UNHEARD_AFTER_S:
                told = seconds
                self._tell_unheard()

        if self._pulled:
            self._refuse_touched()
        self._pulled = True
        everything = range(len(stock.fragments))
        self._holders.through(lambda: self._holders.wait(stock.pull(everything, count), check))
        stock.take_pulled(())
        tensors = [*(param.data for param in self._replica.params), *self._replica.buffers]
        with torch.no_grad():
            torch._foreach_copy_(tensors, stock.value_of)
        self._buffers.begin()
        self._count = self._heard = count

    def _tell_unheard(self) -> None:
        """Somebody's push was counted, and some server has not heard of it: from now on it has."""
        (reply,) = self._holders.wait([self._holders.out([self._place], Unheard(self._heard))])
        tail: Tail = reply.message
        for entry in tail.entries:
            self._apply(entry.count, memoryview(entry.update))

    # the register

    @property
    def _place(self) -> int:
        """It lies behind the fragments."""
        return len(self._stock.fragments)

    def _ask(self, message: msgspec.Struct, *body: memoryview) -> Any:
        self._told_s = -_TELL_EVERY_S

        def attempt() -> Any:
            return self._holders.wait([self._holders.back([self._place], message, *body)], self._check)[0]

        return self._holders.through(attempt)

    def _check(self, seconds: float) -> None:
        """While waiting: say who is dead."""
        self._seat.check()
        lost = self._seat.lost()
        if lost and seconds - self._told_s > _TELL_EVERY_S:
            self._told_s = seconds
            self._holders.out([self._place], Lost(lost))

    def close(self) -> None:
        self._holders.close()


def _times(rate: Any, part: float) -> Any:
    """A learning rate, as plain values, for a part of a step."""
    return {**rate, "value": rate["value"] * part} if isinstance(rate, dict) else rate * part
