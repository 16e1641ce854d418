"""A server process: it holds fragments for the run, until the run ends or nobody leads it any more."""

from __future__ import annotations

import os
import threading
import time

from paceline.cluster import wire
from paceline.cluster.board import Board, Phase
from paceline.cluster.link import LeaderLink
from paceline.cluster.messages import Hello, Put, Welcome
from paceline.launch.environment import ticket
from paceline.servers.plain import serve
from paceline.servers.shelf import Shelf
from paceline.settings import merge

_LOOK_S = 0.5


def main() -> None:
    handed = ticket()
    assert handed is not None and handed.server >= 0
    secret, settings = bytes.fromhex(handed.secret), merge(handed.flags, {})[0]
    link = LeaderLink(handed.address, secret, Hello(handed.worker, os.getpid()), lambda: handed.fence, settings.grace)
    welcome, fds = link.greet()
    assert isinstance(welcome, Welcome)
    board = Board(fds[0], welcome.rows)
    board.row(handed.worker).enter(Phase.SCRIPT)
    address = f"{handed.address}-server-{handed.server}"
    listening = wire.listen(address)
    threading.Thread(target=serve, args=(listening, secret, Shelf()), daemon=True).start()
    link.ask(Put(f"server/{handed.server}", address))
    while not board.abort and board.unled_s <= settings.grace:
        time.sleep(_LOOK_S)  # the agent ends this process when the last worker has gone


if __name__ == "__main__":
    main()
