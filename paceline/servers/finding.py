"""How a worker finds the servers of its run: the leader knows the layout, and that has their addresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.servers.lines import Server, line_to
from paceline.wires.messages import Layout, Placed, Sizes

_LOOK_S = 0.05
Ask = Callable[[Any], tuple[Any, list[int]]]


class Fleet:
    """`ask` puts a question to the leader; `name` is how this worker calls itself; `room` is what it wants of the servers."""

    def __init__(self, ask: Ask, secret: bytes, name: str, room: str) -> None:
        self._ask, self._secret, self._name, self._room = ask, secret, name, room

    def size(self, nbytes: list[int]) -> None:
        self._ask(Sizes(nbytes, self._room))

    def layout(self, after: int) -> Placed:
        placed, _ = self._ask(Layout(after))
        assert isinstance(placed, Placed) and self._room in placed.rooms
        return placed.of(self._room)

    def dial(self, address: str) -> Server:
        """One that does not answer in time is frozen: it is waited for until it goes on, or is ended."""
        while True:
            try:
                return self._dial_once(address)
            except TimeoutError:
                continue

    def _dial_once(self, address: str) -> Server:
        return Server(*(line_to(address, self._secret, self._name) for _ in range(2)))


class FarFleet(Fleet):
    """The same on several machines. A connection to a machine that is cut off does not end by itself, and whoever waits on
    it cannot look elsewhere. So a thread follows the layouts, and hangs up on servers that are in none any more.

    `follow` is a way to ask for that thread alone; `check` raises if waiting is in vain.
    """

    def __init__(self, ask: Ask, secret: bytes, name: str, room: str, follow: Ask, check: Callable[[], None]) -> None:
        super().__init__(ask, secret, name, room)
        self._follow, self._check = follow, check
        self._changed = threading.Condition()
        """Guards what follows."""
        self._newest = Placed(0, [], [], [], {})
        self._dialled: list[tuple[str, Server]] = []
        self._failed: BaseException | None = None
        threading.Thread(target=self._keep_following, name="paceline-layouts", daemon=True).start()

    def layout(self, after: int) -> Placed:
        with self._changed:
            while self._newest.number <= after or self._room not in self._newest.rooms:
                if self._failed is not None:
                    raise self._failed
                self._changed.wait(_LOOK_S)
                self._check()
            return self._newest.of(self._room)

    def dial(self, address: str) -> Server:
        """As long as there is such a server; a machine may not be reached for a moment."""
        while True:
            if not self._is_there(address):  # first: to call one that is cut off takes seconds
                raise ConnectionError(f"there is no server at {address} any more")
            try:
                server = self._dial_once(address)
            except OSError:
                self._check()
                time.sleep(_LOOK_S)
                continue
            with self._changed:
                self._dialled = [each for each in self._dialled if not each[1].over] + [(address, server)]
                gone = address not in self._newest.addresses.values()
            if gone:
                server.close()
            return server

    def _is_there(self, address: str) -> bool:
        """As far as is known. Nothing more will be, if this cannot follow any longer."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            return address in self._newest.addresses.values()

    def _keep_following(self) -> None:
        try:
            while True:
                newest, _ = self._follow(Layout(self._newest.number))
                assert isinstance(newest, Placed)
                self._take(newest)
        except BaseException as error:  # noqa: BLE001  for whoever waits for a layout
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _take(self, newest: Placed) -> None:
        there = {*newest.addresses.values()}
        with self._changed:
            self._newest = newest
            gone = [server for address, server in self._dialled if address not in there]
            self._dialled = [each for each in self._dialled if each[0] in there]
            self._changed.notify_all()
        for server in gone:
            server.close()
