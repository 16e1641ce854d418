"""What servers are called by. `calling.Line` is the real one, `direct.DirectLine` the one without a socket."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import msgspec

from paceline.servers.calling import Line as RealLine
from paceline.servers.calling import Reply, dial
from paceline.servers.messages import ANSWER, Moved

REDIAL_S = 0.01


class Line(Protocol):
    """Calls go out in order, and are answered in order."""

    @property
    def over(self) -> bool:
        """Whether it is closed, or has broken."""

    def call(self, message: msgspec.Struct, *buffers: memoryview, into: memoryview | None = None) -> Future[Reply]:
        """`into` takes the answer's bytes. An OSError comes out of it if the server is gone, a ValueError if it refuses."""

    def close(self) -> None: ...


class Server(NamedTuple):
    """Gradients leave by one line and values come by the other: a call that waits at the server holds up what was said
    behind it on its own line only."""

    out: Line
    back: Line

    @property
    def over(self) -> bool:
        return self.out.over or self.back.over

    def close(self) -> None:
        self.out.close()
        self.back.close()


def line_to(address: str, secret: bytes, name: str) -> Line:
    return RealLine(dial(address, secret, name), ANSWER)


def before_redial() -> None:
    """A line has broken, which says nothing about its server: that is called again. Whatever ends one line after the other is
    not done at full speed."""
    time.sleep(REDIAL_S)


def moved(reply: Reply) -> bool:
    """What was asked for is not there: a newer layout says where."""
    return isinstance(reply.message, Moved)
