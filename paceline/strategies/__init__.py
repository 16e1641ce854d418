"""How workers keep in step: one file each, one protocol, one table of names.

To add a strategy, write one file with a class that follows `Strategy`, and name it here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError
from paceline.servers import clocks
from paceline.servers.delays import Delays, split
from paceline.strategies import rhythm

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy


class Entry(NamedTuple):
    module: str
    """Imported when the strategy is chosen."""
    name: str
    words: str
    """What it does, in a few of them."""
    servers: bool = False
    """Whether workers meet at servers."""
    numbers: str = ""
    """What stands behind its name, for example."""
    one: bool = False
    """Whether there is exactly one server."""
    apart: bool = False
    """Whether each worker trains a replica of its own."""


_FREE = "paceline.strategies.free", "FreeRunning"
_APART = "paceline.strategies.averaging", "Averaging"
TABLE = {
    "allreduce": Entry("paceline.strategies.allreduce", "AllReduce", "every step, gradients, with each other"),
    "ps": Entry("paceline.strategies.ps", "ParameterServers", "every step, gradients, at servers", servers=True),
    "ps+backup": Entry(
        "paceline.strategies.backup", "Backups", "the same, slow shares twice", servers=True, numbers=":1"
    ),
    "central": Entry(
        "paceline.strategies.ps", "ParameterServers", "the same, all variables at one server", servers=True, one=True
    ),
    "async": Entry(*_FREE, "no waiting, gradients, at servers", servers=True),
    "ssp": Entry(*_FREE, "at most 3 steps ahead of the slowest, gradients, at servers", servers=True, numbers=":3"),
    "dssp": Entry(*_FREE, "1 to 8 steps ahead, as it pays, gradients, at servers", servers=True, numbers=":1,8"),
    "local": Entry(*_APART, "every 20 steps, weights, with each other", numbers=":20", apart=True),
    "postlocal": Entry(*_APART, "every step until step 500, then the same", numbers=":500,20", apart=True),
    "diloco": Entry(*_APART, "every 50 steps, differences and an outer optimizer", numbers=":50", apart=True),
    "streaming": Entry(*_APART, "the same in 4 fragments, beside training", numbers=":50,4", apart=True),
}


def find(text: str) -> Entry:
    """The strategy of this name, with whatever stands behind it."""
    mode, delays = text, Delays()
    if text.partition(":")[0] not in TABLE:
        mode, delays = split(text)
    name, _, numbers = mode.partition(":")
    if name not in TABLE:
        there = ", ".join(f"{known}{entry.numbers} ({entry.words})" for known, entry in TABLE.items())
        raise UsageError(f"unknown strategy {text!r}; there are: {there}")
    if delays and TABLE[name].module != _FREE[0]:
        raise UsageError(
            f"--strategy {text}: only workers at their own pace have delays; write async, ssp:3 or dssp:1,8"
        )
    if TABLE[name].apart:
        rhythm.parse(text)
    elif TABLE[name].servers:
        clocks.parse(mode)
    elif numbers:
        raise UsageError(f"--strategy {text}: {name} takes no numbers; write --strategy {name}")
    return TABLE[name]


def create(text: str) -> Strategy:
    entry = find(text)
    strategy: Strategy = getattr(import_module(entry.module), entry.name)(text)
    return strategy
