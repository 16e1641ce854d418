"""Floats in fewer bytes, bit for bit, for a thin link: the bytes that have sign and exponent, put together, take less than half. Pure.

The other three bytes of a float are noise, and are sent as they are. Of a replica's own state that saves a seventh (momentum and what a
codec keeps, measured), and takes less time than a link of 50 MB/s would take for it.
"""

from __future__ import annotations

import zlib

import numpy as np

_WIDTH = 4


def pack(stretch: memoryview) -> list[memoryview]:
    """The bytes with the exponents, packed, and all the others; nothing, if that would not be shorter."""
    if not stretch.nbytes or stretch.nbytes % _WIDTH:
        return []
    planes = np.ascontiguousarray(np.frombuffer(stretch, np.uint8).reshape(-1, _WIDTH).T)
    huffman = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    packed = huffman.compress(planes[-1].data) + huffman.flush()
    if len(packed) >= planes.shape[1]:
        return []
    return [memoryview(packed), memoryview(planes[:-1].reshape(-1).data)]


def unpack(packed: memoryview, others: memoryview, room: memoryview) -> None:
    """Both back to where they belong. ValueError: they are not what `pack` made of so many bytes."""
    words = np.frombuffer(room, np.uint8).reshape(-1, _WIDTH)
    try:
        last = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, len(words))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(last) != len(words):
        raise ValueError(f"{len(last)} of {len(words)} bytes")
    words[:, -1] = np.frombuffer(last, np.uint8)
    words[:, :-1] = np.frombuffer(others, np.uint8).reshape(_WIDTH - 1, -1).T


def rest_of(nbytes: int) -> int:
    """How long the others are, of a stretch of so many bytes."""
    return nbytes // _WIDTH * (_WIDTH - 1)
