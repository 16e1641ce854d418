"""Codecs: gradients as few bytes, one small file for each kind, one protocol, one table of names.

To add one, write a file with a class that follows `base.Codec`, and name it here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.tensors.codecs.base import Codec


class Entry(NamedTuple):
    module: str
    """Imported when the codec is chosen; its function of the codec's name makes one of what stands behind the colon."""
    words: str
    """What it does, in a few of them."""
    numbers: str = ""
    """What stands behind its name, for example."""


_ROOM = "paceline.tensors.codecs."
TABLE = {
    "fp16": Entry(_ROOM + "halves", "2 bytes a value"),
    "bf16": Entry(_ROOM + "halves", "2 bytes a value, of any size"),
    "int8": Entry(_ROOM + "int8", "1 byte a value, a scale for 256"),
    "fp8": Entry(_ROOM + "fp8", "1 byte a value, as a float"),
    "topk": Entry(_ROOM + "topk", "the largest 1 %", ":0.01"),
    "randomk": Entry(_ROOM + "randomk", "a random 1 %", ":0.01"),
    "powersgd": Entry(_ROOM + "powersgd", "matrices as products of rank 2", ":2"),
    "onebit": Entry(_ROOM + "onebit", "signs, a scale for 1024"),
}


def is_codec(text: str) -> bool:
    """Whether this is meant as one, rightly written or not."""
    return text.partition(":")[0] in TABLE


def parse(text: str) -> Codec:
    """The codec of this name.

    >>> parse("topk:0.01").nbytes([(784, 2048), (2048,)])
    96576
    """
    name, colon, numbers = text.partition(":")
    if name not in TABLE:
        raise UsageError(f"unknown codec {text!r}; there are: {listing()}")
    entry = TABLE[name]
    if bool(colon) != bool(entry.numbers):
        wants = "takes no number" if colon else "needs a number"
        raise UsageError(f"{text}: {name} {wants}; write {name}{entry.numbers}")
    make: Callable[[str], Codec] = getattr(import_module(entry.module), name)
    return make(numbers)


def listing() -> str:
    return ", ".join(f"{name}{entry.numbers} ({entry.words})" for name, entry in TABLE.items())
