"""What survives a process: tensors and plain values, as bytes that need no pickle.

A tree of dicts, lists, tuples, tensors and plain values becomes the tensors' raw bytes, each on a 64-byte boundary, a
short header (msgpack) behind them, and that one's length: so tensors can be copied before the rest of the tree is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paceline.errors import UsageError
from paceline.tensors.onepass import Copying

_ALIGN, _LENGTH = 64, 8
_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSOR, _TUPLE, _DICT = "t", "l", "d"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENCODE = msgspec.msgpack.Encoder().encode


class _Header(msgspec.Struct, array_like=True):
    tree: Any
    tensors: list[tuple[str, list[int], int]]
    """(dtype, shape, where its bytes start)"""
    begins: int
    """Where it lies itself: a state that has lost its front is noticed."""


class Copy(NamedTuple):
    """A tensor's way into a snapshot's memory."""

    source: torch.Tensor
    at: int
    """Where its bytes begin there."""


class Snapshot:
    """A tree of state at one moment; its tensors are references until it is written."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        tensors: list[torch.Tensor] = []
        try:
            plain = _plain(tree, tensors)
        except _OddError as odd:
            raise UsageError(odd.words()) from None
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        *self._starts, self._end = _places(self._tensors)
        at = {id(tensor): start for tensor, start in zip(self._tensors, self._starts, strict=True)}
        listed = [(_NAMES[tensor.dtype], list(tensor.shape), at[id(tensor)]) for tensor in tensors]
        self._header = _ENCODE(_Header(plain, listed, self._end))
        self.nbytes = self._end + len(self._header) + _LENGTH

    def lay(self, memory: memoryview) -> list[Copy]:
        """All but the tensors into this memory, of `nbytes`; the copies that are still to be made."""
        memory[self._end :] = self._header + len(self._header).to_bytes(_LENGTH, "little")
        tensors = zip(self._tensors, self._starts, strict=True)
        return [Copy(tensor, at) for tensor, at in tensors if tensor.numel()]

    def write(self, memory: memoryview) -> None:
        copying(self.lay(memory), memory).make()

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


def copying(copies: Iterable[Copy], memory: memoryview) -> Copying:
    """Of tensors that lie as they are in memory of this process while it is made; of any other what it is now."""
    begin = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    stretches, held = [], []
    for source, at in copies:
        values = (
            source.detach()
        )  # a tensor of our own: a script may give the other one new memory, and the old would be gone
        if is_plain(values):
            stretches.append((values.data_ptr(), begin + at, values.nbytes))
            held.append(values)
        else:
            raw = values.cpu().contiguous().view(-1).view(torch.uint8)
            torch.frombuffer(memory, dtype=torch.uint8)[at : at + len(raw)].copy_(raw)
    return Copying(stretches, held)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies as it is in memory of this process."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


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


class _OddError(Exception):
    """Something that does not travel, and where it was met: the way there is put together on the way back."""

    def __init__(self, what: str, advice: str = "") -> None:
        self._what, self._advice, self.path = what, advice, ""

    def words(self) -> str:
        return f"the run's state has a {self._what} at {self.path.lstrip('.') or 'its top'}{self._advice}"


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree with tensors replaced by their numbers."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return [_TENSOR, len(tensors) - 1]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise _OddError("number of more than 64 bits")
        return value
    if isinstance(value, dict):
        return [_DICT, [_item(key, item, tensors) for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = _TUPLE if isinstance(value, tuple) else ""
        return [kind, [_entry(number, item, tensors) for number, item in enumerate(value)]]
    raise _OddError(
        type(value).__name__,
        ": only tensors and plain values (numbers, text, lists, dicts) are handed to other processes; leave it out of state_dict()",
    )


def _item(key: Any, item: Any, tensors: list[torch.Tensor]) -> list[Any]:
    plain = _plain(key, tensors)
    try:
        return [plain, _plain(item, tensors)]
    except _OddError as odd:
        odd.path = f".{key}{odd.path}"
        raise


def _entry(number: int, item: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return _plain(item, tensors)
    except _OddError as odd:
        odd.path = f"[{number}]{odd.path}"
        raise


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
