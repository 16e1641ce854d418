"""All-reduce: the workers meet each other at every step and exchange gradients.

The sum runs over the slots in one fixed tree, so the result is the same bits at any worker count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.servers.register import Register
from paceline.state.replica import Replica
from paceline.strategies.base import Point, Scaled
from paceline.strategies.buffers import Buffers
from paceline.strategies.overlap import Overlap
from paceline.tensors.peers import Peers
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.tree import Plan

LANES = 8


class AllReduce:
    same_bits, may_lag = True, False

    def __init__(self, text: str = "allreduce") -> None:
        """As it is written for --strategy."""

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        self._replica, self._peers, self._mean, self._scaled = replica, peers, mean, scaled
        self._flat_begin: Callable[[], bool] | None = None
        self._flat_finish: Callable[[], None] | None = None
        self._overlap: Overlap | None = None
        self._weight = 1.0
        self._kept: dict[int, tuple[torch.Tensor, Any]] = {}
        self._old: dict[int, torch.Tensor] = {}
        self._zeroes_inside: dict[int, bool] = {}
        self._call = self._last_leaf = 0
        self._sent_before = 0
        """What this worker had sent in groups before this one."""
        self._older = False
        """Whether a flat backward was added to gradients that were there already."""
        self._build()

    def _build(self) -> None:
        """Lay out what is trained now; again when the script thaws a layer."""
        if self._overlap is not None:
            self._overlap.close()
        replica = self._replica
        self._reducer = self._new_reducer([*replica.params, *replica.buffers], len(replica.params))
        self._views: dict[int, list[torch.Tensor]] = {}
        self._buffers = Buffers(replica.buffers, replica.buffer_homes)
        self._overlap = None
        if self._peers.size > 1 or self._scaled:
            self._overlap = Overlap(replica.params, self._reducer, self._grad_of, self._flat_backward_starts)

    def _new_reducer(self, tensors: Sequence[torch.Tensor], count: int) -> Reducer:
        """The first `count` are parameters, the rest buffers."""
        return Reducer(tensors, count, self._peers)

    def meet(self, peers: Peers) -> None:
        self._sent_before += self._peers.sent_bytes
        self._peers = self._reducer.peers = peers
        if self._overlap is None and peers.size > 1:
            self._build()

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        due = self._reducer.carry_on(plan, self._peers, LANES, kept)
        self._last_leaf = due[-1] if due else -1
        return due

    # the shares of a point

    def begin_step(self) -> None:
        """Remember the buffers every share of this step starts from."""
        if self._overlap is not None:
            self._buffers.begin()

    def open(self, point: Point, plan: Plan, flat: bool) -> None:
        if self._replica.thawed:
            self._replica.find_trainable()
            self._build()
        self._reducer.open(plan, LANES)
        mine = plan.leaves_of(self._peers.rank)
        self._call, self._last_leaf = point.call, mine[-1] if mine else -1
        self._kept = {}
        if not flat:
            self._set_aside(self._views.get(point.call, []))
        if self._overlap is not None:
            self._overlap.open(point.call)

    def _set_aside(self, own: list[torch.Tensor]) -> None:
        """Shares start from None; what the script had accumulated before is added at the end.

        Unless the script calls zero_grad() inside its loop: then it finds the old gradient still there,
        and what it removes stays removed.
        """
        for index, param in enumerate(self._replica.params):
            if param.grad is not None:
                ours = own and param.grad.data_ptr() == own[index].data_ptr()
                old = param.grad.clone() if ours else param.grad
                param.grad = old
                self._kept[index] = (old, param.register_hook(partial(self._first_touch, index)))
        self._buffers.begin()

    def _first_touch(self, index: int, grad: torch.Tensor) -> None:
        """Just before a share's gradient is added to a parameter that had one already."""
        self._settle(index)

    def _settle(self, index: int) -> None:
        """Tell a gradient that was kept from one that the script removed; the share starts from None."""
        old, hook = self._kept[index]
        hook.remove()
        param = self._replica.params[index]
        if param.grad is old:
            param.grad = None
            self._old[index] = old
        del self._kept[index]

    def begin_share(self, leaf: int) -> bool:
        return True

    def weigh(self, weight: float) -> None:
        if not self._mean:
            weight = 1.0 if weight else 0.0  # a sum: shares count as they are, or not at all
        self._weight = weight
        if self._overlap is not None:
            self._overlap.weigh(weight)

    def fold(self, leaf: int) -> None:
        if self._kept and (self._weight or leaf == self._last_leaf):
            self._settle_rest(ran=bool(self._weight))
        grads: list[torch.Tensor | None] = [param.grad if self._weight else None for param in self._replica.params]
        with torch.no_grad():
            moves = self._buffers.take()
            grads += moves if self._weight else [None] * len(moves)
            self._reducer.fold(leaf, grads, self._weight)
        self._share_done()

    def drop(self) -> None:
        if self._kept and self._weight:
            self._settle_rest(ran=True)
        with torch.no_grad():
            self._buffers.take()
        self._share_done()

    def _share_done(self) -> None:
        for param in self._replica.params:
            param.grad = None
        if self._overlap is not None:
            self._overlap.share_done()

    def _settle_rest(self, ran: bool) -> None:
        """After the first share that ran: what it left untouched. A worker without any sample of this
        step ran none, and does what it did at this point before."""
        for index in list(self._kept):
            if not ran and self._zeroes_inside.get(self._call, False):
                self._replica.params[index].grad = None
            self._settle(index)
        if ran:
            self._zeroes_inside[self._call] = not self._old

    def _grad_of(self, index: int) -> torch.Tensor | None:
        """A share's gradient; an older one that no backward has touched yet is not it."""
        return None if index in self._kept else self._replica.params[index].grad

    def commit(self, point: Point, key: int, lanes: Sequence[int]) -> NDArray[np.int64]:
        if self._kept:
            self._settle_rest(ran=False)  # this worker had no share of the point
        if self._overlap is not None:
            self._overlap.close_point()
        with torch.no_grad():
            scale = self._scaled.scale if self._scaled else 1.0
            outcome = self._reducer.commit(key, point.call, lanes, self._mean, scale)
            self._views[point.call] = outcome.views
            self._give_back(outcome)
        return outcome.rows

    def _give_back(self, outcome: Outcome) -> None:
        replica, views = self._replica, outcome.views
        for index, (param, present) in enumerate(zip(replica.params, outcome.present, strict=False)):
            if index in outcome.sparse:
                rows = outcome.sparse[index]
                param.grad = views[index].to(param.dtype) + rows if present else rows
            elif present:
                view = views[index]
                param.grad = view if view.dtype == param.dtype else view.to(param.dtype)
        for index, old in self._old.items():
            param = replica.params[index]
            param.grad = old if param.grad is None else param.grad + old
        self._old = {}
        # Buffers move by a mean whatever the gradients do: undo what only those are divided by.
        factor = outcome.divisor / outcome.weight if outcome.weight else 1.0
        count = len(replica.params)
        self._buffers.settle(views[count:], outcome.present[count:], factor)

    # loops without run.slots()

    def on_flat_backward(self, begin: Callable[[], bool], finish: Callable[[], None]) -> None:
        self._flat_begin, self._flat_finish = begin, finish

    def as_begun(self) -> AbstractContextManager[None]:
        if self._older:
            raise UsageError(
                "a worker is gone, and gradients of an earlier backward were there before this step's: nobody else can "
                "compute its share. Add the inner loop `for x, y in run.slots():` around forward and backward, or go on "
                "from a checkpoint (`paceline resume`)"
            )
        return self._buffers.as_begun()

    def _flat_backward_starts(self, index: int) -> bool:
        """Called by the first gradient hook outside a point, which is the index-th parameter's."""
        if self._flat_begin is None or self._flat_finish is None:
            return False
        # The first hook of this backward has just fired: any other gradient is an older one.
        older = [param.grad for k, param in enumerate(self._replica.params) if k != index and param.grad is not None]
        if not self._flat_begin():
            return False
        self._older = any(grad.is_sparse or bool(grad.any()) for grad in older)
        if self._scaled and older:
            # It is unscaled.
            raise UsageError(
                "fp16 in a flat loop cannot add a backward to gradients that are there already: add the inner loop "
                "`for x, y in run.slots():` around forward and backward, or use precision bf16"
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._flat_finish)
        return True

    def capture(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        return

    def whole(self) -> AbstractContextManager[Register | None]:
        return nullcontext()

    def wire_bytes(self) -> int:
        return self._sent_before + self._peers.sent_bytes

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()
