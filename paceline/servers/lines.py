"""A line to a server: calls go out in order, and are answered in order."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

import msgspec

from paceline.servers.messages import Call, Done, Moved


class Reply(NamedTuple):
    message: msgspec.Struct
    body: memoryview
    """Nothing, if it went into memory that was given."""

    @property
    def yes(self) -> bool:
        return isinstance(self.message, Done) and self.message.yes

    @property
    def moved(self) -> bool:
        """Not there: a newer layout says where."""
        return isinstance(self.message, Moved)


class Line(Protocol):
    def call(self, message: Call, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        """`into` takes the answer's bytes. An OSError comes out of it if the server is gone, a ValueError if it refuses."""

    def close(self) -> None: ...


class Server(NamedTuple):
    """Gradients leave by one line and values come by the other: a call that waits at the server holds up what was said
    behind it on its own line only."""

    out: Line
    back: Line

    def close(self) -> None:
        self.out.close()
        self.back.close()
