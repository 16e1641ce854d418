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
    """From a primary, to fill a backup, or to make it the same as itself: a key as it is + the tensor's bytes. With all workers'
    last pushes, so that these fit the keys at any moment."""

    fragments: list[int]
    push: Push
    marks: dict[int, Mark]
    by: int = 0
    """The layout by which it is said; what a backup has been made the same by before, it ignores."""


class Marks(msgspec.Struct, tag=True):
    """The end of these: there are no other keys."""

    fragments: list[int]
    marks: dict[int, Mark]
    keys: list[str]
    by: int = 0


KeySaid = Pushes | Laid | Marks
KeyCall = Pushes | Pulls | Names
