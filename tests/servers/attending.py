"""A server's thread without a server, for tests: it attends to one end of a pair."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from paceline.servers.serving import Caller, Handle, attend
from paceline.tensors.channel import Channel, ChannelEnded, pair
from paceline.wires import wire


@contextlib.contextmanager
def attended(messages: Any, handle: Handle) -> Iterator[Channel]:
    """The caller's end."""
    ours, theirs = pair()

    def serve() -> None:
        with contextlib.suppress(ChannelEnded):
            attend(theirs, Caller("test", "here"), wire.decoder(messages), handle)

    thread = threading.Thread(target=serve)
    thread.start()
    yield ours
    ours.close()
    thread.join()
