"""How a worker finds the servers of its run: the leader knows the layout, and that has their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.cluster.messages import Layout, Placed, Sizes
from paceline.servers.lines import Server
from paceline.servers.plain import PlainLine


class Fleet:
    """`ask` puts a question to the leader."""

    def __init__(self, ask: Callable[[Any], tuple[Any, list[int]]], secret: bytes) -> None:
        self._ask, self._secret = ask, secret

    def size(self, nbytes: list[int]) -> None:
        self._ask(Sizes(nbytes))

    def layout(self, after: int) -> Placed:
        placed, _ = self._ask(Layout(after))
        assert isinstance(placed, Placed)
        return placed

    def dial(self, address: str) -> Server:
        return Server(PlainLine(address, self._secret), PlainLine(address, self._secret))
