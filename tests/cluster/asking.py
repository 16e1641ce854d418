"""One who asks, as simply as can be: a question, its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.wires.wire import Decoder, connect, receive, send


class Link:
    """The side that asks: one request at a time."""

    def __init__(self, address: str, secret: bytes, expected: Decoder) -> None:
        self._expected = expected
        self._socket = connect(address, secret)

    def ask(self, message: msgspec.Struct) -> tuple[Any, list[int]]:
        send(self._socket, message)
        return receive(self._socket, self._expected)

    def tell(self, message: msgspec.Struct) -> None:
        """Say it if anybody listens: an agent that died must not end the training."""
        try:
            self.ask(message)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()
