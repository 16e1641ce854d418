"""A server process: it holds fragments for the run, until the run ends or nobody leads it any more."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from paceline.launch.environment import ticket
from paceline.servers.copying import Copying
from paceline.servers.lines import line_to
from paceline.servers.messages import Call
from paceline.servers.rooms import Rooms
from paceline.servers.serving import Meter, Serving
from paceline.servers.shelf import Shelf
from paceline.settings import merge
from paceline.wires import wire
from paceline.wires.board import Board, Phase, Row
from paceline.wires.link import LeaderLink, NoLeaderError
from paceline.wires.messages import Filled, Hello, Layout, Placed, ServerReady, Welcome
from paceline.wires.tls import Identity

_LOOK_S = 0.5
Result = TypeVar("Result")


def main() -> None:
    handed = ticket()
    assert handed is not None and handed.server >= 0
    secret, settings = bytes.fromhex(handed.secret), merge(handed.flags, {})[0]
    board: Board | None = None

    def new_link() -> LeaderLink:
        def fence() -> int:
            return max(handed.fence, board.leader) if board is not None else handed.fence

        return LeaderLink(handed.address, secret, Hello(handed.worker, os.getpid()), fence, settings.grace)

    link = new_link()
    welcome, fds = link.greet()
    assert isinstance(welcome, Welcome)
    board = Board(fds[0], welcome.rows)
    row = board.row(handed.worker)
    row.enter(Phase.SCRIPT)
    near, name = f"{handed.address}-server-{handed.server}", f"server {handed.server}"
    rooms = Rooms(handed.server, lambda there: line_to(there, secret, name), lambda: partial(_tell_filled, new_link()))
    doors = [wire.listen(near), *([wire.listen_tcp(handed.host)] if handed.host else [])]
    ready = ServerReady(near, wire.tcp_address(*doors[1].getsockname()[:2]) if handed.host else "")
    handle = lambda caller, message, body: _ends_with(rooms.handle, message, body)  # noqa: E731
    Serving(doors, secret, Call, handle, Identity.make() if ready.far.startswith("tls") else None, _meter(row))
    filling = [partial(_keep_filling, shelf) for shelf in rooms.shelves.values()]
    for work in (*filling, partial(_settle, rooms.parameters), partial(_follow_layouts, rooms, link, ready)):
        threading.Thread(target=_ends_with, args=(work,), daemon=True).start()
    while not board.abort and board.unled_s <= settings.grace:
        row.computed(time.process_time_ns())
        time.sleep(_LOOK_S)  # the agent ends this process when the last worker has gone


def _meter(row: Row) -> Meter:
    """Counts on the board, which outlives this process. Each caller has a thread."""
    lock, calls, all_received, all_sent = threading.Lock(), 0, 0, 0

    def count(received: int, sent: int) -> None:
        nonlocal calls, all_received, all_sent
        with lock:
            calls, all_received, all_sent = calls + 1, all_received + received, all_sent + sent
            row.served(calls, all_received, all_sent)

    return count


def _ends_with(work: Callable[..., Result], *arguments: Any) -> Result:
    """A mistake in a thread ends the process, and with it the run: others would wait for ever for what it was to do."""
    try:
        return work(*arguments)
    except (ValueError, NoLeaderError):  # a caller's mistake; nobody leads, which is seen below as well
        raise
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)


def _settle(shelf: Shelf) -> None:
    try:
        shelf.keep_settling()
    except ValueError as error:  # of what was said and answered long ago: nobody's mistake but ours
        raise RuntimeError("an update of rows could not be taken in") from error


def _follow_layouts(rooms: Rooms, link: LeaderLink, ready: ServerReady) -> None:
    link.ask(ready)
    number = 0
    while True:
        layout, _ = link.ask(Layout(number))
        assert isinstance(layout, Placed)
        number = layout.number
        rooms.rearrange(layout)


def _keep_filling(shelf: Copying[Any]) -> None:
    number = 0
    while True:
        number = shelf.fill(number)


def _tell_filled(link: LeaderLink, server: int, since: dict[int, int]) -> None:
    link.ask(Filled(server, since))


if __name__ == "__main__":
    main()
