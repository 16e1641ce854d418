"""A checksum depends on all the bytes and on nothing else: not on the pieces they came in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.state.checksum import Checksum


def checksum(*pieces: bytes) -> str:
    made = Checksum()
    for piece in pieces:
        made.add(piece)
    return made.hex()


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@given(st.lists(st.integers(0, 1300), max_size=6))
def test_pieces_of_any_size_give_the_same(sizes: list[int]) -> None:
    pieces = [some_bytes(size) for size in sizes]
    assert checksum(*pieces) == checksum(b"".join(pieces))


def test_it_can_be_asked_for_in_between() -> None:
    made = Checksum()
    made.add(b"one")
    assert made.hex() == made.hex() == checksum(b"one")
    made.add(b", two")
    assert made.hex() == checksum(b"one, two")


@pytest.mark.parametrize("size", [1, 511, 512, 2000])
def test_a_change_of_any_byte_is_seen(size: int) -> None:
    raw = bytearray(some_bytes(size))
    right = checksum(raw)
    for at in range(size):
        for change in (1, 0x80, 0xFF):
            raw[at] ^= change
            assert checksum(raw) != right, (at, change)
            raw[at] ^= change


@pytest.mark.parametrize("block", [512, 4096])
def test_blocks_that_are_lost_or_change_places_are_seen(block: int) -> None:
    raw = some_bytes(4 * block)
    first, second, rest = raw[:block], raw[block : 2 * block], raw[2 * block :]
    damaged = [second + first + rest, first + bytes(block) + rest, first + first + rest, rest + first + second]
    assert len({checksum(one) for one in [raw, *damaged]}) == 5
