"""Commands and agents of tests' runs without their imports: forks of a process that has done them.

`Popen` here is subprocess's own, but for `python -m paceline …` and `python -m paceline.cluster.agent …`: to start the
one and two of the other is two thirds of a short run's work (measured: 0.8 of 1.2 s of processor time). While there is a
`Template`, such a process is a fork of it, with the sockets, output, environment, folder, network and command line that
were asked for; it runs the module as `python -m` would. In it `subprocess.Popen` is this one too: the agent that a
forked command starts is a fork, and so is that one's standby. Paceline knows nothing of it.

As with `tests/warm.py`, whose nurseries have torch, which none of these has: a process that is asked for in another
environment than the template's is started bare, and BARE=1 lets all be.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from paceline.cluster.store import runtime_folder
from paceline.launch import boot
from tests.network import enter
from tests.warm import ROOM, ROOM_BYTES, ROOT, alike, show, take_environment

MODULES = ("paceline", "paceline.cluster.agent")
_VERBS = ("run", "agent", "resume", "attach", "stop", "scale", "runs", "show", "logs", "checkpoints")
PREPARED = (
    *(f"paceline.cli.{verb}" for verb in _VERBS),
    "paceline.watch.terminal",
    "paceline.watch.viewer",
    MODULES[1],
)
_START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests import forked; del sys.path[0]; forked.main()"
_door = ""
"""Where to ask for a fork; nowhere, if it is empty."""


class Popen(subprocess.Popen[Any]):
    """A fork is no child of ours: the template says on a line of its own when it has ended, and how."""

    _line: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, _, _, pass_fds, cwd, env, _, _, shell, stdin, stdin_to, stdout_from, stdout, stderr_from, stderr, *_ = rest
        if not _door or shell or pass_fds or module_of(args) not in MODULES:
            return super()._execute_child(args, *rest)
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        ask = {"command": args, "folder": os.fspath(cwd or os.getcwd()), "environment": environment}
        standard = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        with open("/proc/self/ns/net") as network:
            line, pid = _ask(ask, [*standard, network.fileno()])
        if not pid:
            return super()._execute_child(args, *rest)
        self.pid, self._line, self._child_created = pid, line, True
        self._close_pipe_fds(stdin, stdin_to, stdout_from, stdout, stderr_from, stderr)
        return None

    def _internal_poll(self, *deadstate: Any, **options: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*deadstate, **options)
        return self._told(0.0)

    def _wait(self, timeout: float | None) -> int | None:
        if self._line is None:
            return super()._wait(timeout)
        if self._told(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _told(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            assert self._line is not None
            self._line.settimeout(timeout if timeout is None else max(timeout, 0.0))
            try:
                said = self._line.recv(16)
            except (BlockingIOError, TimeoutError):
                return None
            self._line.close()
            self.returncode = int(said or -signal.SIGKILL)  # a template that is gone says nothing
        return self.returncode


def module_of(command: Any) -> str:
    """Of `python -m MODULE …` or `python -P -m MODULE …`; else nothing."""
    words = [*map(str, command)] if isinstance(command, list) else []
    if words[:1] != [sys.executable]:
        return ""
    after = words[2:] if words[1:2] == ["-P"] else words[1:]
    return after[1] if after[:1] == ["-m"] and len(after) > 1 else ""


def _ask(ask: dict[str, Any], fds: list[int]) -> tuple[socket.socket, int]:
    """The line on which its end will be told, and its process; 0 if the template will not."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(_door)
        socket.send_fds(line, [json.dumps(ask, default=str).encode()], fds)
        pid = int(line.recv(16))
    except BaseException:
        line.close()
        raise
    if not pid:
        line.close()
    return line, pid


class Template:
    """The process, from whoever starts it; `Popen` asks it until it is closed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        global _door
        self._folder = tempfile.TemporaryDirectory(prefix="forked-", dir=runtime_folder())
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(address)  # here, and not there: whoever comes while it imports waits
            door.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(door.fileno()), " " * ROOM_BYTES],
                cwd=ROOT, env={**environment, ROOM: " " * ROOM_BYTES},
                stdin=subprocess.PIPE, pass_fds=[door.fileno()], start_new_session=True,
            )  # fmt: skip
        _door = address

    def close(self) -> None:
        global _door
        _door = ""
        self._process.communicate()
        self._folder.cleanup()


def main() -> None:
    """The template's process, until whoever started it is done."""
    global _door
    started_with = dict(os.environ)
    _prepare()
    set_by_imports = {name: value for name, value in os.environ.items() if name not in started_with}
    door = socket.socket(fileno=int(sys.argv[1]))
    _door = door.getsockname()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(door, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            elif key.fileobj is door:
                line, _ = door.accept()
                _answer(line, started_with, set_by_imports, selector)
            else:
                selector.unregister(key.fileobj)
                _tell_end(key.fd, *key.data)


def _prepare() -> None:
    for name in PREPARED:
        importlib.import_module(name)
    # `python -m` runs it under another name, and warns if it is there already.
    del sys.modules[MODULES[1]], sys.modules["paceline.cluster"].agent
    assert "torch" not in sys.modules and len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()


def _answer(line: socket.socket, own: Mapping[str, str], added: Mapping[str, str], selector: Any) -> None:
    said, fds, _, _ = socket.recv_fds(line, 1 << 20, 4)
    ask = json.loads(said)
    if alike({**own, **added}, {**added, **ask["environment"]}):
        pid = os.fork()
        if pid == 0:
            _be(ask, fds, added)
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))
        line.send(str(pid).encode())
    else:
        line.send(b"0")
        line.close()
    for fd in fds:
        os.close(fd)


def _tell_end(pidfd: int, pid: int, line: socket.socket) -> None:
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    with line, contextlib.suppress(OSError):  # whoever asked for it may be gone before it
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


@contextlib.contextmanager
def whole_life() -> Iterator[None]:
    """Of a fork, as Python would end it. It never goes back into the loop that it is a fork of."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:  # noqa: BLE001  Python too hands it to the hook, whatever it is
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        boot._run_exit_handlers()
        os._exit(code)  # to take torch apart costs a quarter of a second


def _be(ask: dict[str, Any], fds: list[int], set_by_imports: Mapping[str, str]) -> NoReturn:
    """The fork, to its end."""
    with whole_life():
        os.setsid()
        *standard, network = fds
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
            enter(network)
        os.closerange(3, 1 << 10)
        os.chdir(ask["folder"])
        command = ask["command"]
        take_environment({**set_by_imports, **ask["environment"]})
        show(command, ask["environment"])
        subprocess.Popen = Popen
        module = module_of(command)
        sys.orig_argv, sys.argv = command, ["-m", *command[command.index(module) + 1 :]]
        if "-P" not in command[:2]:
            sys.path.insert(0, ask["folder"])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError("it is over")
