"""How a worker finds the servers of its run: the leader knows the layout, and that has their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.cluster.messages import Layout, Placed, Sizes
from paceline.servers.lines import Server, line_to


class Fleet:
    """`ask` puts a question to the leader; `name` is how this worker calls itself; `room` is what it wants of the servers."""

    def __init__(self, ask: Callable[[Any], tuple[Any, list[int]]], secret: bytes, name: str, room: str) -> None:
        self._ask, self._secret, self._name, self._room = ask, secret, name, room

    def size(self, nbytes: list[int]) -> None:
        self._ask(Sizes(nbytes, self._room))

    def layout(self, after: int) -> Placed:
        placed, _ = self._ask(Layout(after))
        assert isinstance(placed, Placed) and self._room in placed.rooms
        return placed.of(self._room)

    def dial(self, address: str) -> Server:
        return Server(*(line_to(address, self._secret, self._name) for _ in range(2)))
