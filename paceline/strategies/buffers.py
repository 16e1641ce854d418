"""Buffers (BatchNorm's running statistics and counters) follow one rule at any worker count: every share
starts from the values the step began with, and a buffer moves by the weighted mean of the shares' moves.

A buffer that no share changed is left alone, so a constant one may hold anything (a mask of -inf).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.replica import Replica


class Buffers:
    def __init__(self, replica: Replica) -> None:
        self._tensors, self._homes = replica.buffers, replica.buffer_homes
        self._start = [torch.empty_like(tensor) for tensor in self._tensors]

    @property
    def start(self) -> list[torch.Tensor]:
        """What shares start from."""
        return self._start

    def begin(self) -> None:
        """Shares start from what the buffers hold now."""
        if self._tensors:
            torch._foreach_copy_(self._start, self._tensors)

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Inside, buffers hold the values that shares start from; afterwards what this share has made of them."""
        now = [module._buffers[name] for module, name in self._homes]
        moved = [tensor.clone() for tensor in self._tensors]
        for (module, name), tensor, start in zip(self._homes, self._tensors, self._start, strict=True):
            module._buffers[name] = tensor
            tensor.copy_(start)
        try:
            yield
        finally:
            for (module, name), tensor, own, value in zip(self._homes, self._tensors, now, moved, strict=True):
                module._buffers[name] = own
                tensor.copy_(value)

    def take(self) -> list[torch.Tensor | None]:
        """How far a share has moved each buffer (None: not at all), which is put back for the next share."""
        moves: list[torch.Tensor | None] = []
        for index, (tensor, (module, name)) in enumerate(zip(self._tensors, self._homes, strict=True)):
            now, start = module._buffers[name], self._start[index]
            assert now is not None
            # By value: BatchNorm's kernel does not bump a version. A GPU is not waited for: all count as changed.
            if not now.is_cuda and torch.equal(now, start):
                moves.append(None)
                module._buffers[name] = tensor
                continue
            moves.append(_move(now, start))
            module._buffers[name] = tensor  # a module may have put a new tensor in its place
            tensor.copy_(start)
        return moves

    def go_on(self, moves: Sequence[torch.Tensor | None]) -> None:
        """What was taken is put back: the share goes on."""
        with torch.no_grad():
            for tensor, move in zip(self._tensors, moves, strict=True):
                if move is not None:
                    tensor.add_(move if tensor.dtype.is_floating_point else move.round().to(tensor.dtype))

    def values(self) -> list[torch.Tensor]:
        """What the buffers hold now: a copy, whole numbers in double precision."""
        held = [module._buffers[name] for module, name in self._homes]
        return [now.clone() if now.is_floating_point() else now.double() for now in held if now is not None]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """They hold this from now on."""
        for tensor, start, (module, name), value in zip(self._tensors, self._start, self._homes, values, strict=True):
            tensor.copy_((value if tensor.dtype.is_floating_point else value.round()).to(tensor.dtype))
            start.copy_(tensor)
            module._buffers[name] = tensor  # a module may have put a new tensor in its place

    def settle(self, moves: Sequence[torch.Tensor], present: Sequence[bool], factor: float) -> None:
        """All shares are in: `moves` times `factor` is their mean."""
        for index, tensor in enumerate(self._tensors):
            if present[index]:
                move = moves[index] if factor == 1.0 else moves[index] * factor
                rounded = move if tensor.dtype.is_floating_point else move.round()
                tensor.copy_(self._start[index] + rounded.to(tensor.dtype))
                self._start[index].copy_(tensor)


def _move(now: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    if not now.is_floating_point():
        return (now - start).double()
    return torch.where(now == start, torch.zeros_like(now), now - start)  # inf - inf is not a number
