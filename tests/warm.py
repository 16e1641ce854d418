"""Runs of tests without two seconds of imports each: their nurseries are forks of a process that has imported torch.

`python -m tests.warm` is that process, one for each test process. Paceline knows nothing of it: an agent starts its
nursery as always, by a command, and `tests/site/sitecustomize.py` asks from within for a fork that takes its place. The
fork has that nursery's sockets, output, environment, folder, network, command line; it runs the nursery's own main().

It stands in only for a nursery that would have been started as it was itself, in the same environment, so that its bits
are the same: `--threads 2`, say, or a variable that a test sets, has a nursery that imports torch by itself. BARE=1
in the environment of the tests lets all do so; `make rehearse` has it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from paceline.cluster.store import runtime_folder
from paceline.faults.marked import VARIABLE
from paceline.launch import nursery
from paceline.launch.environment import nursery_environment
from paceline.launch.nursing import SECRET
from tests.network import enter

ROOT = Path(__file__).resolve().parents[1]
_SITE = str(ROOT / "tests" / "site")
_ADDRESS = "TESTS_WARM"
ROOM = "TESTS_WARM_ROOM"
ROOM_BYTES = 1 << 14
_MAY_DIFFER = {SECRET, VARIABLE, ROOM, "PYTEST_CURRENT_TEST", "TEST_CHECKPOINTS", "PACELINE_EVICT_WITHOUT_KILL"}
"""Variables that no import looks at."""
_START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.warm import main; del sys.path[0]; main()"
"""As a nursery's command leaves sys.path."""


class Warm:
    """The process, from whoever starts it: nurseries with these `variables` are forks of it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-", dir=runtime_folder())
        address = f"{self._folder.name}/socket"
        paths = [_SITE, *filter(None, [environment.get("PYTHONPATH")])]
        self.variables = {_ADDRESS: address, "PYTHONPATH": os.pathsep.join(paths)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(address)  # here, and not there: whoever comes while it imports waits
            door.listen(64)
            self._process = subprocess.Popen(
                # Its own command and environment give the room in which those of a nursery are written.
                [sys.executable, "-P", "-c", _START, str(door.fileno()), " " * ROOM_BYTES],
                cwd=ROOT, env={**nursery_environment({**environment, **self.variables}, 1), ROOM: " " * ROOM_BYTES},
                stdin=subprocess.PIPE, pass_fds=[door.fileno()], start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


def main() -> None:
    """Until whoever started it is done."""
    started_with = dict(os.environ)
    nursery.prepare()
    set_by_imports = {name: value for name, value in os.environ.items() if name not in started_with}
    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever asked has the pidfd
    while True:
        ready, _, _ = select.select([door, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)  # to take torch apart costs a quarter of a second
        line, _ = door.accept()
        _answer(line, started_with, set_by_imports)


def _answer(line: socket.socket, started_with: Mapping[str, str], set_by_imports: Mapping[str, str]) -> None:
    with line:
        said, fds, _, _ = socket.recv_fds(line, 1 << 20, 6)
        ask = json.loads(said)
        if alike(started_with, ask["environment"]):
            pid = os.fork()
            if pid == 0:
                _be_nursery(ask, fds, set_by_imports)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(line, [b"it lives"], [pidfd])
            os.close(pidfd)
        for fd in fds:
            os.close(fd)


def alike(own: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    """Whether what was imported in the one environment is what would be in the other."""
    return all(own.get(name) == asked.get(name) for name in (own.keys() | asked.keys()) - _MAY_DIFFER)


def _be_nursery(ask: dict[str, Any], fds: list[int], set_by_imports: Mapping[str, str]) -> NoReturn:
    """The fork, to its end. It never goes back into the loop that it is a fork of."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        *standard, door, starter, network = fds
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
            enter(network)
        for start, stop in pairwise([2, *sorted([door, starter]), 1 << 10]):
            os.closerange(start + 1, stop)
        os.chdir(ask["folder"])
        take_environment({**ask["environment"], **set_by_imports})
        show(ask["command"], ask["environment"])
        sys.orig_argv = ask["command"]
        sys.argv = [nursery.__file__, str(door), str(starter), ask["log"]]
        nursery.main()
    except BaseException:  # noqa: BLE001  whatever it was, the frames above are another process's
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def take_environment(environment: Mapping[str, str]) -> None:
    """Each variable is set anew, also where it has this value: none may lie any more where `show` writes."""
    for name in set(os.environ) - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def show(command: list[str], environment: Mapping[str, str]) -> None:
    """What /proc says of this process: leaks and runs that are to be ended are looked for there."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    args_from, args_to, env_from, env_to = map(int, fields[45:49])
    for start, end, words in (
        (args_from, args_to, command),
        (env_from, env_to, [f"{name}={value}" for name, value in environment.items()]),
    ):
        written = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(written) <= end - start, f"{len(written)} bytes, and room for {end - start}"
        ctypes.memmove(start, written.ljust(end - start, b"\0"), end - start)
