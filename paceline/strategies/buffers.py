"""Buffers (BatchNorm's running statistics and counters) follow one rule at any worker count: every share
starts from the values the step began with, and a buffer moves by the weighted mean of the shares' moves.

A buffer that no share changed is left alone, so a constant one may hold anything (a mask of -inf). One that has got
another shape or type since prepare() is a cache: it stays as its worker has made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch

from paceline.state.replica import Home


class Buffers:
    """Of a model; or whatever else follows that rule."""

    def __init__(self, tensors: list[torch.Tensor], homes: Sequence[Home]) -> None:
        self._tensors, self._homes = tensors, homes
        self._start = [torch.empty_like(tensor) for tensor in self._tensors]

    @property
    def start(self) -> list[torch.Tensor]:
        """What shares start from."""
        return self._start

    @torch.no_grad()
    def begin(self) -> None:
        """Shares start from what the buffers hold now; the script may have put another tensor in one's place."""
        for index, (home, name) in enumerate(self._homes):
            now = home.get(name)
            if now is not self._tensors[index] and _alike(now, self._tensors[index]):
                self._tensors[index].copy_(now)
                home[name] = self._tensors[index]
        if self._tensors:
            torch._foreach_copy_(self._start, self._tensors)

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Inside, buffers hold the values that shares start from; afterwards what this share has made of them."""
        kept = []
        for (home, name), tensor, start in zip(self._homes, self._tensors, self._start, strict=True):
            now = home.get(name)
            if _alike(now, tensor):
                kept.append((home, name, now, tensor, tensor.clone()))
                home[name] = tensor
                tensor.copy_(start)
        try:
            yield
        finally:
            for home, name, now, tensor, value in kept:
                home[name] = now
                tensor.copy_(value)

    def take(self) -> list[torch.Tensor | None]:
        """How far a share has moved each buffer (None: not at all), which is put back for the next share."""
        moves: list[torch.Tensor | None] = []
        for tensor, start, (home, name) in zip(self._tensors, self._start, self._homes, strict=True):
            now = home.get(name)
            if not _alike(now, tensor):
                moves.append(None)
                continue
            # By value: BatchNorm's kernel does not bump a version. A GPU is not waited for: all count as changed.
            if not now.is_cuda and torch.equal(now, start):
                moves.append(None)
                home[name] = tensor
                continue
            moves.append(_move(now, start))
            home[name] = tensor  # a module may have put a new tensor in its place
            tensor.copy_(start)
        return moves

    @torch.no_grad()
    def go_back(self) -> None:
        """They hold what shares start from."""
        for tensor, start, (home, name) in zip(self._tensors, self._start, self._homes, strict=True):
            tensor.copy_(start)
            if _alike(home.get(name), tensor):
                home[name] = tensor

    def go_on(self, moves: Sequence[torch.Tensor | None]) -> None:
        """What was taken is put back: the share goes on."""
        with torch.no_grad():
            for tensor, move in zip(self._tensors, moves, strict=True):
                if move is not None:
                    tensor.add_((move if tensor.dtype.is_floating_point else move.round()).to(tensor))

    def values(self) -> list[torch.Tensor]:
        """What the buffers hold now: a copy, whole numbers in double precision."""
        held = []
        for tensor, (home, name) in zip(self._tensors, self._homes, strict=True):
            now = home.get(name)
            held.append(now if _alike(now, tensor) else tensor)
        return [now.clone() if now.is_floating_point() else now.double() for now in held]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """They hold this from now on."""
        for tensor, start, (home, name), value in zip(self._tensors, self._start, self._homes, values, strict=True):
            tensor.copy_((value if tensor.dtype.is_floating_point else value.round()).to(tensor.dtype))
            start.copy_(tensor)
            if _alike(home.get(name), tensor):
                home[name] = tensor  # a module may have put a new tensor in its place

    def settle(self, moves: Sequence[torch.Tensor], present: Sequence[bool], factor: float) -> None:
        """All shares are in: `moves` times `factor` is their mean."""
        for index, tensor in enumerate(self._tensors):
            if present[index]:
                move = moves[index] if factor == 1.0 else moves[index] * factor
                rounded = move if tensor.dtype.is_floating_point else move.round()
                tensor.copy_(self._start[index] + rounded.to(tensor))
                self._start[index].copy_(tensor)


def _alike(now: torch.Tensor | None, tensor: torch.Tensor) -> TypeGuard[torch.Tensor]:
    if now is tensor:
        return True
    return now is not None and (now.shape, now.dtype, now.device) == (tensor.shape, tensor.dtype, tensor.device)


def _move(now: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    if not now.is_floating_point():
        return (now - start).double()
    return torch.where(now == start, torch.zeros_like(now), now - start)  # inf - inf is not a number
