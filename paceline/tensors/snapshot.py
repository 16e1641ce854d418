"""What survives a process: tensors and plain values, as bytes that need no pickle.

A tree of dicts, lists, tuples, tensors and plain values becomes the tensors' raw bytes, each on a 64-byte boundary, a
short header (msgpack) behind them, and that one's length: so tensors can be copied before the rest of the tree is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paceline.errors import UsageError
from paceline.tensors import onepass

_ALIGN, _LENGTH = 64, 8
_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSOR, _TUPLE, _DICT = "t", "l", "d"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Header(msgspec.Struct, array_like=True):
    tree: Any
    tensors: list[tuple[str, list[int], int]]
    """(dtype, shape, where its bytes start)"""
    begins: int
    """Where it lies itself: a state that has lost its front is noticed."""


class Copy(NamedTuple):
    """A tensor's way into a snapshot's memory."""

    source: torch.Tensor
    target: torch.Tensor
    """Its bytes, flat."""

    def make(self) -> None:
        onepass.copy(self.source.detach().cpu().contiguous().reshape(-1).view(torch.uint8), self.target)

    def stretches(self, size: int) -> Iterable[Copy]:
        """The same of a contiguous tensor, in copies of at most so many bytes."""
        if self.target.nbytes <= size:
            return (self,)
        raw = self.source.detach().view(-1).view(torch.uint8)
        return map(Copy, raw.split(size), self.target.split(size))


class Snapshot:
    """A tree of state at one moment; its tensors are references until it is written. `first`: those that `copies` puts where
    they belong though nothing else is known."""

    def __init__(self, tree: Any, first: Sequence[torch.Tensor] = ()) -> None:
        self.tree = tree
        tensors: list[torch.Tensor] = []
        plain = _plain(tree, tensors, "")
        known = {id(tensor) for tensor in first}
        self._tensors = [*first, *{id(tensor): tensor for tensor in tensors if id(tensor) not in known}.values()]
        *starts, self._end = _places(self._tensors)
        at = {id(tensor): start for tensor, start in zip(self._tensors, starts, strict=True)}
        listed = [(str(tensor.dtype), list(tensor.shape), at[id(tensor)]) for tensor in tensors]
        self._header = msgspec.msgpack.encode(_Header(plain, listed, self._end))
        self.nbytes = self._end + len(self._header) + _LENGTH

    def lay(self, memory: memoryview) -> list[Copy]:
        """All but the tensors into this memory, of `nbytes`; the copies that are still to be made."""
        memory[self._end :] = self._header + len(self._header).to_bytes(_LENGTH, "little")
        return copies(self._tensors, memory)

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
        header = _head(memory)
        tensors = []
        for name, shape, at in header.tensors:
            tensor = torch.empty(shape, dtype=_DTYPES[name])
            if tensor.numel():
                flat = tensor.view(-1).view(torch.uint8)
                raw = np.frombuffer(memory, dtype=np.uint8, count=len(flat), offset=at)
                flat.copy_(torch.from_numpy(raw.copy()))
            tensors.append(tensor)
        return Snapshot(_tree(header.tree, tensors))


def copies(tensors: Sequence[torch.Tensor], memory: memoryview) -> list[Copy]:
    """Of tensors that a snapshot begins with."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    starts = zip(tensors, _places(tensors), strict=False)
    return [Copy(tensor, flat[at : at + _bytes(tensor)]) for tensor, at in starts if tensor.numel()]


def room_for(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `copies` of these need."""
    return _places(tensors)[-1]


def places(memory: memoryview) -> list[tuple[int, int]]:
    """Where in its bytes each of a snapshot's tensors and what is behind them begin, and how long they are."""
    header = _head(memory)
    sizes = [math.prod(shape) * _DTYPES[name].itemsize for name, shape, _ in header.tensors]
    tensors = [(at, size) for (_, _, at), size in zip(header.tensors, sizes, strict=True)]
    return [*tensors, (header.begins, len(memory) - header.begins)]


def _head(memory: memoryview) -> _Header:
    size = int.from_bytes(memory[-_LENGTH:], "little")
    begins = len(memory) - _LENGTH - size
    header = msgspec.msgpack.decode(memory[max(begins, 0) : -_LENGTH], type=_Header)
    if header.begins != begins:
        raise ValueError(f"a state of {len(memory)} bytes, of which something is missing")
    return header


def _places(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where each begins, one behind the other, and where the last one ends."""
    return list(accumulate((-(-_bytes(tensor) // _ALIGN) * _ALIGN for tensor in tensors), initial=0))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
