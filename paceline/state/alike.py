"""What two states have in common, so that it need not be sent: behind an exchange most of a replica's state is every replica's.

A state's bytes are cut into pieces that do not depend on what lies before them, each with a checksum. Where a copy is taken in,
pieces that are there already, in the state of a replica of that machine, are taken from there. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from xxhash import xxh3_128_digest

from paceline.tensors.snapshot import places

_MOST = 1 << 20


class Piece(msgspec.Struct, array_like=True, frozen=True):
    begin: int
    end: int
    checksum: bytes
    """Of what lies between."""


def checksum(stretch: memoryview) -> bytes:
    """What has the same is the same."""
    return xxh3_128_digest(stretch)


def pieces(state: memoryview) -> list[Piece]:
    """Of the bytes of a snapshot: its header, and its tensors."""
    cuts = [
        (at, min(at + _MOST, begin + size)) for begin, size in places(state) for at in range(begin, begin + size, _MOST)
    ]
    return [Piece(begin, end, checksum(state[begin:end])) for begin, end in cuts]


def missing(wanted: Sequence[Piece], known: Iterable[bytes]) -> list[int]:
    """Which of these are to be sent: not those whose checksum is known, and one alone of several that are the same.

    >>> missing([Piece(0, 8, b"a"), Piece(8, 16, b"b"), Piece(16, 24, b"c"), Piece(24, 32, b"b")], [b"c"])
    [0, 1]
    """
    there, found = set(known), []
    for number, piece in enumerate(wanted):
        if piece.checksum not in there:
            there.add(piece.checksum)
            found.append(number)
    return found


def arrived(room: memoryview, wanted: Sequence[Piece]) -> list[int]:
    """Which of these lie where they belong already.

    >>> piece = Piece(1, 4, checksum(memoryview(b"bcd")))
    >>> arrived(memoryview(b"abcd"), [piece]), arrived(memoryview(b"abbd"), [piece])
    ([0], [])
    """
    return [number for number, piece in enumerate(wanted) if checksum(room[piece.begin : piece.end]) == piece.checksum]


def lying(state: memoryview) -> dict[bytes, memoryview]:
    """What lies in this state, by its checksum."""
    return {piece.checksum: state[piece.begin : piece.end] for piece in pieces(state)}


def fill(room: memoryview, wanted: Sequence[Piece], there: Sequence[int], known: Mapping[bytes, memoryview]) -> bool:
    """The rest of a state, of which those are there. False: what is known has changed meanwhile."""
    here = {wanted[number].checksum: wanted[number] for number in there}
    for piece in wanted:
        target, same = room[piece.begin : piece.end], here.get(piece.checksum)
        if same is piece:
            continue
        target[:] = room[same.begin : same.end] if same is not None else known[piece.checksum]
        if same is None and checksum(target) != piece.checksum:
            return False
    return True
