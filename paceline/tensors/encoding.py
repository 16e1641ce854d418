"""Gradients made into messages: which of a model's tensors a codec acts on, and where each lies among the values.

Buffers, and parameters in double precision, are left out: they travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.data.order import mix
from paceline.errors import UsageError
from paceline.tensors.codecs.base import Codec
from paceline.tensors.codecs.feedback import send
from paceline.tensors.layout import sum_dtype

_SEED = 301


def seed_of(*place: int) -> int:
    """Of a message, by where it belongs: the same for whoever encodes and decodes it."""
    return mix(_SEED, *place)


class Message(NamedTuple):
    mask: int
    """Of which tensors there is a gradient: a bit each."""
    raw: torch.Tensor


class Encoder:
    """Of the first `count` tensors, which are parameters, those that can be coded."""

    def __init__(self, tensors: Sequence[torch.Tensor], count: int, codec: Codec) -> None:
        self.codec = codec
        self.coded = [index for index in range(count) if sum_dtype(tensors[index].dtype) == torch.float32]
        """Which tensors these are; `shapes` are theirs."""
        mine = [tensors[index] for index in self.coded]
        self.shapes = [tensor.shape for tensor in mine]
        self._strides = [torch.empty_like(tensor, device="meta").stride() for tensor in mine]
        ends = list(accumulate(tensor.numel() for tensor in mine))
        self.stretches = [slice(end - tensor.numel(), end) for tensor, end in zip(mine, ends, strict=True)]
        self.elements = ends[-1] if ends else 0
        self.size = codec.nbytes(self.shapes)
        """Of a message."""
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._values = torch.zeros(self.elements, device=self.device)
        self._value_views = self.windows(self._values)

    def windows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor in a flat of values."""
        return [
            torch.as_strided(flat, shape, stride, at.start)
            for shape, stride, at in zip(self.shapes, self._strides, self.stretches, strict=True)
        ]

    def encode(
        self, grads: Sequence[torch.Tensor | None], weight: float, seed: int, old: torch.Tensor, new: torch.Tensor
    ) -> Message:
        """The gradients (None where there is none, and of all tensors) times the weight, and what was kept in `old`; `new` is
        what is kept from now on."""
        mask, absent = self._take_in(grads)
        if weight != 1.0:
            self._values.mul_(weight)
        for at in absent:
            self._values[at] = 0.0
        here = new if new.device == self.device else torch.empty_like(new, device=self.device)
        raw = send(self.codec, self._values, self.shapes, seed, old.to(self.device), here, absent)
        if here is not new:
            new.copy_(here)
        return Message(mask, raw.cpu())

    def _take_in(self, grads: Sequence[torch.Tensor | None]) -> tuple[int, list[slice]]:
        mask, absent = 0, []
        for number, (index, at) in enumerate(zip(self.coded, self.stretches, strict=True)):
            grad = grads[index]
            if grad is None:
                absent.append(at)
                continue
            if grad.is_sparse:
                raise UsageError(
                    f"a sparse gradient (of shape {tuple(grad.shape)}) cannot be sent by the codec {self.codec.name}: make it "
                    "dense (nn.Embedding(sparse=False)), or leave the codec out"
                )
            self._value_views[number].copy_(grad)
            mask |= 1 << number
        return mask, absent
