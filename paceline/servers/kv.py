"""Tensors by name, at a server: pushed by any worker, combined there, pulled by any.

A key is made by a push with `assign`. Every push makes a new version of its tensor, and a pull is one version,
whole: while anybody is still being sent it, it is not written; a push meanwhile makes the next one elsewhere. So
a puller that is slow or frozen holds up no push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, prod
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.servers.calling import Lines, Reply
from paceline.servers.serving import Answer, Caller
from paceline.tensors import lending
from paceline.tensors.channel import memory_of

_LONGEST_KEY = 200
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor) -> str:
    return _NAMES[tensor.dtype]


class Combine(NamedTuple):
    """What a push does with what is there, in the key's own dtype: `do(ours, theirs, rate, out)`."""

    words: str
    do: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], Any]
    rated: bool = False
    """Whether it takes a rate; then it is for floating point only."""


COMBINE = {
    "assign": Combine("what is pushed", lambda ours, theirs, rate, out: out.copy_(theirs)),
    "sum": Combine("ours + theirs", lambda ours, theirs, rate, out: torch.add(ours, theirs, out=out)),
    "max": Combine("the larger one, by element", lambda ours, theirs, rate, out: torch.maximum(ours, theirs, out=out)),
    "min": Combine("the smaller one, by element", lambda ours, theirs, rate, out: torch.minimum(ours, theirs, out=out)),
    "sgd": Combine(
        "ours - rate * theirs",
        lambda ours, theirs, rate, out: torch.sub(ours, theirs, alpha=rate, out=out),
        rated=True,
    ),
    "blend": Combine(
        "ours + rate * (theirs - ours)",
        lambda ours, theirs, rate, out: torch.lerp(ours, theirs, rate, out=out),
        rated=True,
    ),
}


class Push(msgspec.Struct, tag=True, frozen=True):
    """+ the tensor's bytes; answered by `Pushed`, or by `Pulled` if the result is wanted back."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    combine: str
    pull: bool = False
    rate: float | None = None
    at_least: int = 0
    """What the version is then, if it would not be newer: a key that is brought back goes on where it was."""


class Pull(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Pulled`; by `Pushed` if the version is not newer than that."""

    key: str
    newer_than: int = 0


Call = Push | Pull


class Pushed(msgspec.Struct, tag=True, frozen=True):
    version: int


class Pulled(msgspec.Struct, tag=True, frozen=True):
    """+ the tensor's bytes."""

    version: int
    dtype: str
    shape: tuple[int, ...]


Replies = Pushed | Pulled


@dataclass(eq=False)
class _Memory:
    tensor: torch.Tensor
    readers: int = 0


@dataclass(eq=False)
class _Entry:
    """A key's tensor, and none before its first version. The lock is held while it is combined, never while it is sent."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    current: _Memory
    spare: _Memory
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def match(self, push: Push) -> None:
        """Whether it can take this."""
        if not self.version and push.combine != "assign":
            raise _unknown(self.key)
        if (push.dtype, push.shape) != (self.dtype, self.shape):
            raise ValueError(
                f"{self.key} is {self.dtype} of shape {self.shape}, and {push.dtype} of {push.shape} was pushed"
            )

    def put(self, theirs: torch.Tensor, push: Push) -> None:
        target = self.current
        if target.readers:
            target = self.spare if not self.spare.readers else _Memory(torch.empty_like(self.current.tensor))
        COMBINE[push.combine].do(self.current.tensor, theirs, push.rate or 0.0, target.tensor)
        if target is not self.current:
            self.current, self.spare = target, self.current
        self.version = max(self.version + 1, push.at_least)

    def answer(self) -> Answer:
        memory = self.current
        memory.readers += 1
        message = Pulled(self.version, self.dtype, self.shape)
        return Answer(message, [memory_of(memory.tensor)], partial(self._read, memory))

    def _read(self, memory: _Memory) -> None:
        with self.lock:
            memory.readers -= 1


def _unknown(key: str) -> ValueError:
    return ValueError(f"there is no key {key[:_LONGEST_KEY]!r}; it is made by a push with assign")


class Store:
    """The server's side. Pushes and pulls may come from many threads. `lent`: callers are on this machine, and read tensors
    where they lie; for others ordinary memory will do."""

    def __init__(self, lent: bool = True) -> None:
        self._empty = lending.empty if lent else torch.empty
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        """Guards the table; each entry has its own."""

    def handle(self, caller: Caller, message: Call, body: memoryview) -> Answer:
        """What `Serving` calls, where a store is all that a server has."""
        if isinstance(message, Push):
            return self.push(message, body)
        if body.nbytes:
            raise ValueError(f"a pull brings nothing, and {body.nbytes} bytes came")
        return self.pull(message)

    def check(self, push: Push, body: memoryview) -> torch.Tensor:
        """What is pushed; ValueError if it cannot be."""
        theirs = _tensor(push, body)
        _check_combine(push)
        with self._lock:
            entry = self._entries.get(push.key)
        if entry is not None and entry.version:
            entry.match(push)
        elif push.combine != "assign":
            raise _unknown(push.key)
        elif not push.key or len(push.key) > _LONGEST_KEY or not push.key.isprintable():
            raise ValueError(f"a key has 1 to {_LONGEST_KEY} printable characters, unlike {push.key[:_LONGEST_KEY]!r}")
        return theirs

    def push(self, push: Push, body: memoryview) -> Answer:
        theirs = self.check(push, body)
        with self._lock:
            entry = self._entries.get(push.key)
            if entry is None:
                first, second = (_Memory(self._empty(push.shape, dtype=DTYPES[push.dtype])) for _ in range(2))
                entry = self._entries[push.key] = _Entry(push.key, push.dtype, push.shape, first, second)
        with entry.lock:
            entry.match(push)
            entry.put(theirs, push)
            return entry.answer() if push.pull else Answer(Pushed(entry.version))

    def lay(self, push: Push, body: memoryview) -> None:
        """The key as another store has it, whatever it is here."""
        self.push(push, body)
        self._entries[push.key].version = push.at_least

    def keep(self, keys: Collection[str]) -> None:
        """No others."""
        with self._lock:
            for key in self._entries.keys() - set(keys):
                del self._entries[key]

    def pull(self, pull: Pull) -> Answer:
        with self._lock:
            entry = self._entries.get(pull.key)
        if entry is None:
            raise _unknown(pull.key)
        with entry.lock:
            if not entry.version:
                raise _unknown(pull.key)
            return entry.answer() if entry.version > pull.newer_than else Answer(Pushed(entry.version))

    def version(self, key: str) -> int:
        """0: there is none."""
        with self._lock:
            return self._entries[key].version if key in self._entries else 0

    def everything(self) -> Iterator[tuple[Push, torch.Tensor]]:
        """Pushes that would make the same store. Nothing may be pushed meanwhile."""
        for entry in list(self._entries.values()):
            if entry.version:
                push = Push(entry.key, entry.dtype, entry.shape, "assign", at_least=entry.version)
                yield push, entry.current.tensor


def _check_combine(push: Push) -> None:
    combine = COMBINE.get(push.combine)
    if combine is None:
        raise ValueError(f"{push.key}: there is no combine {push.combine!r}; there are {', '.join(COMBINE)}")
    if not combine.rated and push.rate is not None:
        raise ValueError(f"{push.key}: {push.combine} takes no rate")
    if combine.rated and (push.rate is None or not isfinite(push.rate)):
        raise ValueError(f"{push.key}: {push.combine} ({combine.words}) needs a rate, and has {push.rate}")
    if combine.rated and not DTYPES[push.dtype].is_floating_point:
        raise ValueError(f"{push.key} is {push.dtype}, and {push.combine} is for floating point")


def _tensor(push: Push, body: memoryview) -> torch.Tensor:
    """The body as what it is said to be."""
    key = push.key[:_LONGEST_KEY]
    if push.dtype not in DTYPES:
        raise ValueError(f"{key}: there is no dtype {push.dtype[:_LONGEST_KEY]!r}; there are {', '.join(DTYPES)}")
    dtype = DTYPES[push.dtype]
    if any(size < 0 for size in push.shape) or len(push.shape) > 16:
        raise ValueError(f"{key}: no tensor has the shape {push.shape[:16]}")
    if prod(push.shape) * dtype.itemsize != body.nbytes:
        raise ValueError(f"{key}: {push.dtype} of shape {push.shape} is not {body.nbytes} bytes")
    if not body.nbytes:
        return torch.empty(push.shape, dtype=dtype)
    return torch.frombuffer(body, dtype=dtype).view(push.shape)


# a worker's side


class Versioned(NamedTuple):
    version: int
    tensor: torch.Tensor | None
    """None, if only a version was asked for, or there was none newer."""


class Keys:
    """The tensors of a server, over lines to it. Calls go out at once; those of one key are done in their order."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._lanes: dict[str, int] = {}
        """Keys are dealt out to the lines as they come."""

    def push(self, key: str, tensor: torch.Tensor, combine: str = "sum") -> Future[Versioned]:
        return self._push(key, tensor, combine, None, False)

    def pull(self, key: str, into: torch.Tensor | None = None, if_newer_than: int | None = None) -> Future[Versioned]:
        """Into a contiguous tensor on the host, if one of its size is given, which is nobody's until then."""
        message = Pull(key, 0 if if_newer_than is None else if_newer_than)
        return self._call(key, message, (), into)

    def push_pull(
        self, key: str, tensor: torch.Tensor, combine: str = "sum", into: torch.Tensor | None = None
    ) -> Future[Versioned]:
        """What came of this very push."""
        return self._push(key, tensor, combine, into, True)

    def _push(
        self, key: str, tensor: torch.Tensor, combine: str, into: torch.Tensor | None, pull: bool
    ) -> Future[Versioned]:
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{key} is {tensor.dtype}; there are {', '.join(DTYPES)}")
        message = Push(key, _NAMES[tensor.dtype], tuple(tensor.shape), combine, pull)
        return self._call(key, message, (memory_of(tensor),), into)

    def _call(
        self, key: str, message: Call, body: tuple[memoryview, ...], into: torch.Tensor | None
    ) -> Future[Versioned]:
        lane = self._lanes.setdefault(key, len(self._lanes))
        memory = None if into is None else memory_of(into)
        return self._lines[lane].turned(partial(_versioned, into), message, *body, into=memory)


def _versioned(into: torch.Tensor | None, reply: Reply) -> Versioned:
    message = reply.message
    if isinstance(message, Pushed):
        return Versioned(message.version, None)
    if into is not None and (_NAMES[into.dtype], tuple(into.shape)) == (message.dtype, message.shape):
        return Versioned(message.version, into)
    found = torch.empty(message.shape, dtype=DTYPES[message.dtype])
    if found.numel():
        found = torch.frombuffer(reply.body, dtype=found.dtype).view(message.shape)
    return Versioned(message.version, found)
