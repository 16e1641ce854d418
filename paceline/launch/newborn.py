"""The first moments of a forked worker: out of the nursery's skin, into the state of a fresh process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from paceline.cluster.nursing import Fork
from paceline.launch import boot


def live(fork: Fork, log: int, leave_nursery: Callable[[], None]) -> NoReturn:
    """Be worker `fork.worker`. Whatever happens, this process never goes back into the nursery's loop."""
    try:
        # A group of its own: its loader processes can be killed with it.
        os.setsid()
        _take_descriptors(log)
        leave_nursery()
        os.environ.update(fork.environment)
        _draw_new_entropy()
        sys.orig_argv = [sys.executable, "-m", "paceline.launch.boot", *fork.arguments]
        boot.run(fork.arguments)
    except BaseException:  # noqa: BLE001  also SystemExit: the frames above are another process's
        traceback.print_exc()
    os._exit(1)


def _take_descriptors(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


def _draw_new_entropy() -> None:
    """`random` does this by itself at a fork; numpy would let all workers draw what the nursery would."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
