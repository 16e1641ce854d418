"""A server in the same process: what a run of one has, and what tests have beside the real one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from paceline.servers.calling import RefusedError, Reply
from paceline.servers.copying import Copying
from paceline.servers.lines import Server
from paceline.servers.serving import Answer
from paceline.wires.messages import Placed


class DirectLine:
    """Leads straight to a shelf; a call that has to wait does so in the caller's thread."""

    over = False

    def __init__(self, shelf: Copying[Any]) -> None:
        self._shelf = shelf

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        try:
            answer = Answer(*self._shelf.handle(message, memoryview(bytearray().join(body))))
        except ValueError as error:
            future.set_exception(RefusedError(str(error)))
            return future
        raw = bytearray().join(answer.buffers)
        if answer.sent is not None:
            answer.sent()
        if into is not None and len(raw) == len(into):
            into[:] = raw
        future.set_result(Reply(answer.message, memoryview(raw)))
        return future

    def close(self) -> None:
        return


class OwnServer:
    """The directory of a run that has its one server in itself."""

    def __init__(self, shelf: Copying[Any]) -> None:
        self._shelf = shelf
        self._fragments = 0

    def size(self, nbytes: list[int]) -> None:
        self._fragments = len(nbytes)

    def layout(self, after: int) -> Placed:
        layout = Placed(after + 1, [[0]] * self._fragments, [[1]] * self._fragments, [[]] * self._fragments, {0: ""})
        self._shelf.rearrange(layout)
        return layout

    def dial(self, address: str) -> Server:
        return Server(DirectLine(self._shelf), DirectLine(self._shelf))
