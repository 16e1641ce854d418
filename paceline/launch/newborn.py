"""The first moments of a forked worker: out of the nursery's skin, into the state of a fresh process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from paceline.launch import boot
from paceline.launch.nursing import Fork


def live(fork: Fork, log: int, leave_nursery: Callable[[], None]) -> NoReturn:
    """Be worker `fork.worker`. Whatever happens, this process never goes back into the nursery's loop."""
    try:
        # A group of its own: its loader processes can be killed with it.
        os.setsid()
        _take_descriptors(log)
        leave_nursery()
        Path("/proc/self/comm").write_text(f"paceline-{fork.worker}")  # for `top`: else all look alike
        os.environ.update(fork.environment)
        _draw_new_entropy()
        _forget_what_the_script_has(fork.arguments)
        sys.orig_argv = [sys.executable, "-P", "-m", "paceline.launch.boot", *fork.arguments]
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


def _forget_what_the_script_has(arguments: list[str]) -> None:
    """A profile.py beside the script is what its `import profile` means, whatever torch has imported before."""
    folder = os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.abspath(arguments[0]))
    if not os.path.isdir(folder):
        return  # there is no such script, as will be said in a moment
    for name in {entry.partition(".")[0] for entry in os.listdir(folder)} & sys.modules.keys():
        known = getattr(sys.modules[name], "__spec__", None)
        if known is None or known.origin in ("built-in", "frozen"):
            continue  # Python itself looks for these first
        own = PathFinder.find_spec(name, [folder])
        # Without a loader it is a mere folder of that name, which would come last.
        if own is not None and own.loader is not None and own.origin != known.origin:
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]
