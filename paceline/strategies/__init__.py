"""How workers keep in step: one file each, one protocol, one table of names.

To add a strategy, write one file with a class that follows `Strategy`, and name it here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy

TABLE = {
    "allreduce": ("paceline.strategies.allreduce", "AllReduce", "every step, gradients, with each other"),
}
"""name → (module, class, what it does in a few words). Modules are imported when chosen."""


def check(name: str) -> str:
    """The name, if there is such a strategy."""
    if name not in TABLE:
        there = ", ".join(f"{known} ({words})" for known, (_, _, words) in TABLE.items())
        raise UsageError(f"unknown strategy {name!r}; there are: {there}")
    return name


def create(name: str) -> Strategy:
    module, cls, _ = TABLE[check(name)]
    strategy: Strategy = getattr(import_module(module), cls)()
    return strategy
