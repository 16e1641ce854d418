"""A server in the same process: what a run of one has, and what tests have beside the real one."""

from __future__ import annotations

from concurrent.futures import Future

from paceline.servers.holders import Reply
from paceline.servers.messages import Call
from paceline.servers.shelf import Shelf


class DirectServer:
    """Both lines lead straight to a shelf; a call that has to wait does so in the caller's thread."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.out = self.back = self

    def call(self, message: Call, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        try:
            answer, buffers = self._shelf.handle(message, memoryview(bytearray().join(body)))
        except ValueError as error:
            future.set_exception(error)
            return future
        raw = b"".join(buffers)
        if into is not None:
            into[:] = raw
        future.set_result(Reply(answer, memoryview(b"" if into is not None else raw)))
        return future

    def close(self) -> None:
        return
