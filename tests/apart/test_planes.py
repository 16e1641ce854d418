"""Floats in fewer bytes: the same bits come back, and what would not be shorter stays as it is."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.apart.planes import pack, rest_of, unpack


def back(packed: list[memoryview], size: int) -> bytes:
    room = memoryview(bytearray(size))
    unpack(*packed, room)
    return bytes(room)


@given(st.binary(min_size=1, max_size=400), st.integers(1, 200))
def test_whatever_is_packed_comes_back(raw: bytes, times: int) -> None:
    raw *= times
    packed = pack(memoryview(raw))
    if packed:
        assert sum(part.nbytes for part in packed) < len(raw) and packed[1].nbytes == rest_of(len(raw))
        assert back(packed, len(raw)) == raw


def test_floats_take_a_seventh_less() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)) * 1e-3
    raw = memoryview(values.numpy().tobytes())
    packed = pack(raw)
    assert sum(part.nbytes for part in packed) < 0.87 * raw.nbytes
    assert back(packed, raw.nbytes) == raw


@pytest.mark.parametrize("raw", [b"", b"123", np.random.default_rng(1).bytes(4096)], ids=["nothing", "odd", "noise"])
def test_what_would_not_be_shorter_is_not_packed(raw: bytes) -> None:
    assert not pack(memoryview(raw))


def deflated(raw: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(raw) + made.flush()


@pytest.mark.parametrize("packed", [b"\xff\xff", deflated(b"1"), b""], ids=["nonsense", "short", "empty"])
def test_nonsense_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(memoryview(packed), memoryview(bytes(6)), memoryview(bytearray(8)))


def test_too_much_takes_no_memory() -> None:
    room = memoryview(bytearray(8))
    unpack(memoryview(deflated(b"\1" * (1 << 28))), memoryview(bytes(6)), room)
    assert room == b"\0\0\0\1\0\0\0\1"
