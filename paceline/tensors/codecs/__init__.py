"""Codecs: gradients as few bytes, one small file for each kind, one protocol, one table of names.

To add one, write a file with a class that follows `base.Codec`, and name it here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError
from paceline.settings import there_are

if TYPE_CHECKING:
    from paceline.tensors.codecs.base import Codec


class Entry(NamedTuple):
    module: str
    """Imported when the codec is chosen; its function of the codec's name makes one."""
    words: str
    """What it does, in a few of them."""
    number: str = ""
    """What stands behind its name, for example."""
    read: Callable[[str, str], float] = lambda name, number: 0.0
    keeps: bool = True
    """Whether it keeps what a message leaves out."""


def _share(name: str, number: str) -> float:
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise UsageError(
            f"{name}:{number}: the share of values to send is more than 0 and at most 1; write {name}:0.01"
        )
    return share


def _rank(name: str, number: str) -> int:
    if not (number.isascii() and number.isdecimal() and int(number)):
        raise UsageError(f"{name}:{number}: the rank is a whole number from 1 on; write {name}:2")
    return int(number)


_ROOM = "paceline.tensors.codecs."
TABLE = {
    "fp16": Entry(_ROOM + "halves", "2 bytes a value", keeps=False),
    "bf16": Entry(_ROOM + "halves", "2 bytes a value, of any size", keeps=False),
    "int8": Entry(_ROOM + "int8", "1 byte a value, a scale for 256"),
    "fp8": Entry(_ROOM + "fp8", "1 byte a value, as a float"),
    "topk": Entry(_ROOM + "topk", "the largest 1 %", ":0.01", _share),
    "randomk": Entry(_ROOM + "randomk", "a random 1 %", ":0.01", _share),
    "powersgd": Entry(_ROOM + "powersgd", "matrices as products of rank 2", ":2", _rank),
    "onebit": Entry(_ROOM + "onebit", "signs, a scale for 1024"),
}


def is_codec(text: str) -> bool:
    """Whether this is meant as one, rightly written or not."""
    return text.partition(":")[0] in TABLE


def read(text: str) -> tuple[str, float]:
    """A codec's name and number. No torch in here."""
    name, colon, number = text.partition(":")
    if name not in TABLE:
        raise UsageError(f"unknown codec {text!r}{there_are(name, TABLE, _listed())}")
    entry = TABLE[name]
    if bool(colon) != bool(entry.number):
        wants = "takes no number" if colon else "needs a number"
        raise UsageError(f"the codec {text} {wants}; write {name}{entry.number}")
    return name, entry.read(name, number)


def parse(text: str) -> Codec:
    """The codec of this name.

    >>> parse("topk:0.01").nbytes([(784, 2048), (2048,)])
    96562
    """
    name, number = read(text)
    make: Callable[[float], Codec] = getattr(import_module(TABLE[name].module), name)
    return make(number)


def _listed() -> list[str]:
    return [f"{name}{entry.number} ({entry.words})" for name, entry in TABLE.items()]
