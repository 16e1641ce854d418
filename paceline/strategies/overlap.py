"""Buckets leave while backward still runs.

A hook on each parameter counts how often its gradient is added to in a share. The first time through
a reduce point nothing leaves early: the counts are learned. From then on a bucket of the worker's
last share leaves as soon as its parameters have reached their counts, in the order of buckets. If a
gradient changes after its bucket left (a script that takes one more backward than before), the bucket
is folded again and everybody sends it again: early is a guess that is checked, never a rule for the
user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.tensors.reduce import Reducer


class Overlap:
    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        reducer: Reducer,
        grad_of: Callable[[int], torch.Tensor | None],
        outside: Callable[[int], bool],
    ) -> None:
        """`grad_of(index)` is a share's gradient; `outside(index)` is asked when a hook fires at no point."""
        self._params, self._reducer, self._grad_of, self._outside = params, reducer, grad_of, outside
        self._learned: dict[int, list[int]] = {}
        self._fires = [0] * len(params)
        self._open, self._call, self._weight = False, 0, 1.0
        self._waiting: list[int] = []
        self._next = 0
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._fired, index)) for index, param in enumerate(params)
        ]

    def open(self, call: int) -> None:
        self._open, self._call = True, call
        self._start_share()

    def weigh(self, weight: float) -> None:
        if weight != self._weight:
            for bucket in range(self._next):
                self._reducer.left_too_early(bucket)
        self._weight = weight

    def share_done(self) -> None:
        self._learned[self._call] = self._fires
        self._start_share()

    def close_point(self) -> None:
        self._open = False

    def _start_share(self) -> None:
        self._fires = [0] * len(self._params)
        learned = self._learned.get(self._call)
        self._waiting = self._reducer.waits(learned) if learned is not None else []
        self._next = 0

    def _fired(self, index: int, param: torch.Tensor) -> None:
        if not self._open and not self._outside(index):
            return
        fires = self._fires
        fires[index] += 1
        learned = self._learned.get(self._call)
        if learned is None or not self._reducer.on_last_leaf:
            return
        bucket = self._reducer.bucket_of(index)
        if fires[index] == learned[index]:
            self._waiting[bucket] -= 1
            self._leave()
        elif fires[index] > learned[index] and bucket < self._next:
            self._reducer.left_too_early(bucket)

    def _leave(self) -> None:
        while self._next < len(self._waiting) and self._waiting[self._next] == 0:
            with torch.no_grad():
                if not self._reducer.finish_early(self._next, self._grad_of, self._weight, self._swap):
                    return
            self._next += 1

    def _swap(self, index: int, grad: torch.Tensor) -> None:
        self._params[index].grad = grad

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
