"""What is said of keys. A fragment is here all keys whose names fall to it, whatever they are."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec

from paceline.servers.kv import Pull, Push

FRAGMENTS = 64


def fragment_of(key: str) -> int:
    """The same in every process and every run.

    >>> fragment_of("conv1.weight"), fragment_of("conv1.bias")
    (53, 2)
    """
    return zlib.crc32(key.encode()) % FRAGMENTS


class Pushes(msgspec.Struct, tag=True):
    """From a worker: its `number`-th push into this one fragment + the tensor's bytes. The one before was answered. It is
    answered by `Pushed`, or by `Pulled`; said again, by what is there then."""

    fragments: list[int]
    worker: int
    number: int
    push: Push


class Pulls(msgspec.Struct, tag=True):
    """From a worker; answered by `Pulled`, or by `Pushed` if there is nothing newer."""

    fragments: list[int]
    pull: Pull


class Names(msgspec.Struct, tag=True):
    """Which keys there are in the fragment; answered by `Done` + an encoded list."""

    fragments: list[int]


class Mark(NamedTuple):
    """A worker's last push into a fragment that was done."""

    number: int
    version: int
    """Of its key, then."""


class Laid(msgspec.Struct, tag=True):
    """From a primary, to fill a backup: a key as it is + the tensor's bytes."""

    fragments: list[int]
    push: Push


class Marks(msgspec.Struct, tag=True):
    """The same, of all workers' last pushes."""

    fragments: list[int]
    marks: dict[int, Mark]


KeySaid = Pushes | Laid | Marks
KeyCall = Pushes | Pulls | Names
