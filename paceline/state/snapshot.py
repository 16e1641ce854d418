"""What survives a process: tensors and plain values, as bytes that need no pickle.

A tree of dicts, lists, tuples, tensors and plain values becomes a short header (msgpack) and the
tensors' raw bytes behind it, each on a 64-byte boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paceline.errors import UsageError
from paceline.tensors import onepass

_ALIGN = 64
_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSOR, _TUPLE, _DICT = "t", "l", "d"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Header(msgspec.Struct, array_like=True):
    tree: Any
    tensors: list[tuple[str, list[int], int]]
    """(dtype, shape, where its bytes start behind the header)"""


class Copy(NamedTuple):
    """A tensor's way into a snapshot's memory."""

    source: torch.Tensor
    target: torch.Tensor
    """Its bytes, flat."""

    def make(self) -> None:
        onepass.copy(self.source.detach().cpu().contiguous().reshape(-1).view(torch.uint8), self.target)

    def stretches(self, size: int) -> Iterator[Copy]:
        """The same of a contiguous tensor, in copies of at most so many bytes."""
        raw = self.source.detach().view(-1).view(torch.uint8)
        return map(Copy, raw.split(size), self.target.split(size))


class Snapshot:
    """A tree of state at one moment; its tensors are references until it is written."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._tensors: list[torch.Tensor] = []
        places, at = [], 0
        plain = _plain(tree, self._tensors, "")
        for tensor in self._tensors:
            places.append((str(tensor.dtype), list(tensor.shape), at))
            at += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        header = msgspec.msgpack.encode(_Header(plain, places))
        self._first = -(-(8 + len(header)) // _ALIGN) * _ALIGN
        self._header, self._places = header, places
        self.nbytes = self._first + at

    def lay(self, memory: memoryview) -> list[Copy]:
        """All but the tensors into this memory; the copies that are still to be made."""
        memory[:8] = len(self._header).to_bytes(8, "little")
        memory[8 : 8 + len(self._header)] = self._header
        if self.nbytes == self._first:
            return []
        behind = torch.frombuffer(memory, dtype=torch.uint8, offset=self._first)
        return [
            Copy(tensor, behind[at : at + tensor.numel() * tensor.element_size()])
            for tensor, (_, _, at) in zip(self._tensors, self._places, strict=True)
            if tensor.numel()
        ]

    def write(self, memory: memoryview) -> None:
        for copy in self.lay(memory):
            copy.make()

    def packed(self) -> bytearray:
        """For a message; where the state is large, `write` into memory at hand saves a copy."""
        body = bytearray(self.nbytes)
        self.write(memoryview(body))
        return body

    def to_bytes(self) -> bytes:
        return bytes(self.packed())

    @staticmethod
    def read(memory: memoryview) -> Snapshot:
        """The same tree, in memory of its own."""
        header, first = _head(memory)
        tensors = []
        for name, shape, at in header.tensors:
            tensor = torch.empty(shape, dtype=_DTYPES[name])
            if tensor.numel():
                flat = tensor.view(-1).view(torch.uint8)
                raw = np.frombuffer(memory, dtype=np.uint8, count=len(flat), offset=first + at)
                flat.copy_(torch.from_numpy(raw.copy()))
            tensors.append(tensor)
        return Snapshot(_tree(header.tree, tensors))


def places(memory: memoryview) -> list[tuple[int, int]]:
    """Where in its bytes a snapshot's header and each of its tensors begin, and how long they are."""
    header, first = _head(memory)
    sizes = [math.prod(shape) * _DTYPES[name].itemsize for name, shape, _ in header.tensors]
    return [(0, first), *((first + at, size) for (_, _, at), size in zip(header.tensors, sizes, strict=True))]


def _head(memory: memoryview) -> tuple[_Header, int]:
    """And where the tensors' bytes begin."""
    size = int.from_bytes(memory[:8], "little")
    return msgspec.msgpack.decode(memory[8 : 8 + size], type=_Header), -(-(8 + size) // _ALIGN) * _ALIGN


def _plain(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    """The tree with tensors replaced by their numbers; anything that is neither is refused by name."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return [_TENSOR, len(tensors) - 1]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise UsageError(f"the run's state has a number of more than 64 bits at {path.lstrip('.') or 'its top'}")
        return value
    if isinstance(value, dict):
        items = [[_plain(k, tensors, path), _plain(v, tensors, f"{path}.{k}")] for k, v in value.items()]
        return [_DICT, items]
    if isinstance(value, (list, tuple)):
        kind = _TUPLE if isinstance(value, tuple) else ""
        return [kind, [_plain(item, tensors, f"{path}[{number}]") for number, item in enumerate(value)]]
    raise UsageError(
        f"the run's state has a {type(value).__name__} at {path.lstrip('.') or 'its top'}: only tensors and plain values "
        "(numbers, text, lists, dicts) are handed to other processes; leave it out of state_dict()"
    )


def _tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == _TENSOR:
        return tensors[content]
    if kind == _DICT:
        return {_tree(key, tensors): _tree(item, tensors) for key, item in content}
    items = [_tree(item, tensors) for item in content]
    return tuple(items) if kind == _TUPLE else items
