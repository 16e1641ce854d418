"""All that a server holds: parameters and keys. One layout says who holds what of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from paceline.servers.copying import Answered, Copying
from paceline.servers.keys_messages import KeyCall, KeySaid
from paceline.servers.keys_shelf import KeyShelf
from paceline.servers.lines import Line
from paceline.servers.messages import Asked, Call, Copy
from paceline.servers.shelf import Shelf
from paceline.wires.messages import Placed

Told = Callable[[int, dict[int, int]], None]
_OF_KEYS = (*get_args(KeyCall), *get_args(KeySaid))


class Rooms:
    """`new_told` gives each room its own way to say what was filled: they do so from threads of their own."""

    def __init__(self, number: int, dial: Callable[[str], Line], new_told: Callable[[], Told]) -> None:
        self._layout = Placed(0, [], [], [], {})
        self.parameters = Shelf(number, dial, self._numbered("parameters", new_told()), settling=True)
        self.shelves: dict[str, Copying[Any]] = {
            "parameters": self.parameters,
            "keys": KeyShelf(number, dial, self._numbered("keys", new_told())),
        }

    def _numbered(self, room: str, told: Told) -> Told:
        """With a room's fragments by their numbers among all."""

        def say(server: int, since: dict[int, int]) -> None:
            first, _ = self._layout.rooms[room]
            told(server, {first + fragment: number for fragment, number in since.items()})

        return say

    def rearrange(self, layout: Placed) -> None:
        self._layout = layout
        for room, shelf in self.shelves.items():
            shelf.rearrange(layout.of(room))

    def handle(self, message: Call, body: memoryview) -> Answered:
        said = message.call if isinstance(message, Asked) else message.said if isinstance(message, Copy) else message
        return self.shelves["keys" if isinstance(said, _OF_KEYS) else "parameters"].handle(message, body)
