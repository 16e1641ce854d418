"""How workers keep in step: one file each, one protocol, one table of names.

To add a strategy, write one file with a class that follows `Strategy`, and name it here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError

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


TABLE = {
    "allreduce": Entry("paceline.strategies.allreduce", "AllReduce", "every step, gradients, with each other"),
    "ps": Entry("paceline.strategies.ps", "ParameterServers", "every step, gradients, at servers", servers=True),
}


def check(name: str) -> str:
    """The name, if there is such a strategy."""
    if name not in TABLE:
        there = ", ".join(f"{known} ({entry.words})" for known, entry in TABLE.items())
        raise UsageError(f"unknown strategy {name!r}; there are: {there}")
    return name


def create(name: str) -> Strategy:
    entry = TABLE[check(name)]
    strategy: Strategy = getattr(import_module(entry.module), entry.name)()
    return strategy
