"""Messages that nobody should send: from random bytes to valid ones, slightly wrong. Drawn from a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.wires import wire
from paceline.wires.messages import After, Done, Failed, Get, Granted, Hello, Next, Put, Segment, Value, Welcome

_VALID = [
    wire.encode(message)
    for message in (
        Hello(3, 4321),
        Welcome(108, 3, [0, 2, 5], [0, 1, 0], 2),
        After(3),
        Next(5, [2, 0, 7], [1, 0, 0], 3),
        Segment("term-1/meet", 1 << 40),
        Granted(5),
        Put("store", "29500"),
        Get("store"),
        Failed("boom", "Traceback…", 2, True),
        Value("größe"),
        Done(),
    )
]


def _framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _bytes(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randrange(1, 80))


def _mutated(dice: random.Random) -> bytes:
    data = bytearray(dice.choice(_VALID))
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(data))
        match dice.randrange(3):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                data.insert(at, dice.randrange(256))
            case 2 if len(data) > 1:
                del data[at]
    return bytes(data)


def _mutated_inside(dice: random.Random) -> bytes:
    """With a length that fits, so that the decoder gets it."""
    return _framed(_mutated(dice)[4:])


def _truncated(dice: random.Random) -> bytes:
    data = dice.choice(_VALID)
    return data[: dice.randrange(1, len(data))]


def _huge(dice: random.Random) -> bytes:
    return struct.pack("<I", dice.randrange(wire.LARGEST + 1, 1 << 32)) + dice.randbytes(8)


def _bomb(dice: random.Random) -> bytes:
    """A few bytes that claim to be a great many, or to lie deep inside each other."""
    claim = dice.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + dice.randbytes(4)
    nest = dice.choice([b"\x91", b"\x81\xa1a"]) * dice.randrange(1, 3000)
    field = dice.choice([b"\x82\xa4type\xa4Done\xa1x", b"\x82\xa4type\xa4Next\xa7members", b""])
    return _framed(field + dice.choice([claim, nest]))


def _value(dice: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: dice.randrange(-(1 << 63), 1 << 64),
        lambda: dice.choice([None, True, False, float("nan"), -1, 0]),
        lambda: dice.randbytes(dice.randrange(10)),
        lambda: "x" * dice.randrange(10),
    ]
    if depth < 3:
        kinds += [
            lambda: [_value(dice, depth + 1) for _ in range(dice.randrange(4))],
            lambda: {str(n): _value(dice, depth + 1) for n in range(dice.randrange(4))},
        ]
    return dice.choice(kinds)()


def _wrong_types(dice: random.Random) -> bytes:
    message = msgspec.msgpack.decode(dice.choice(_VALID)[4:])
    message[dice.choice(list(message))] = _value(dice)
    return _framed(msgspec.msgpack.encode(message))


_KINDS = (_bytes, _mutated, _mutated_inside, _truncated, _huge, _bomb, _wrong_types)


def noise(dice: random.Random) -> bytes:
    """Bytes as they would come over the wire. By chance some are valid messages."""
    return dice.choice(_KINDS)(dice)
