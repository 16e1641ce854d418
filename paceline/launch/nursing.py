"""An agent's side of the nursery (`launch/nursery.py`), the process that forks its workers. No torch in here.

Nothing here waits for the nursery, which may be busy importing torch: a request is sent, and what comes of
it arrives as events. The nursery outlives the agent that started it; another one connects and is told of
every worker forked so far.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.wires import wire

SECRET = "PACELINE_NURSERY"
"""The variable that brings the nursery the run's secret: a command line can be read by everyone."""
_QUIT_S = 2.0


class Fork(msgspec.Struct, tag=True):
    """Make this worker, unless it was made before; answered by `Forked` or `Refused`."""

    worker: int
    environment: dict[str, str]
    """What this worker has beyond the nursery's own environment."""
    log: str
    append: bool
    arguments: list[str]
    """As for `python -m paceline.launch.boot`."""


class Children(msgspec.Struct, tag=True):
    """Tell of every worker ever forked: a `Forked` for each, `Exited` for those who have, then `Told`."""


class Quit(msgspec.Struct, tag=True):
    """The run is over: end, and end whatever worker is still there."""


class Ready(msgspec.Struct, tag=True):
    """The first message to everyone who is let in, with the nursery's own pidfd: it can fork now."""

    pid: int


class Forked(msgspec.Struct, tag=True):
    """Comes with the worker's pidfd, also when the worker has ended since."""

    worker: int
    pid: int


class Refused(msgspec.Struct, tag=True):
    """This worker could not be made."""

    worker: int
    why: str


class Exited(msgspec.Struct, tag=True):
    """A worker has ended, whatever else was in its process group was killed, and it has been reaped."""

    worker: int
    status: int
    """Its exit code, or the signal that killed it, negative."""


class Told(msgspec.Struct, tag=True):
    """The answer to `Children` is complete."""


REQUEST = wire.decoder(Fork | Children | Quit)
_REPORT = wire.decoder(Ready | Forked | Refused | Exited | Told)


@dataclass(frozen=True)
class Born:
    """A worker is there. The pidfd belongs to whoever gets this event."""

    worker: int
    pid: int
    pidfd: int


@dataclass(frozen=True)
class Closed:
    """The nursery has gone, or has dropped this connection; nothing follows."""


Event = Ready | Born | Refused | Exited | Told | Closed


class Nursery:
    """A connection to a nursery, to be watched by a selector: when it is readable, `on_ready()`."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = sock
        self._process = process
        self._pidfd = os.pidfd_open(process.pid) if process is not None else -1
        self.pid = process.pid if process is not None else 0
        """0: it has not said yet."""
        self._held: list[Fork | Children] | None = []
        """Requests from before it was ready: while it imports it reads nothing, and a full socket would block."""

    @staticmethod
    def start(environment: dict[str, str], log: Path, address: str, secret: bytes) -> Nursery:
        """Start one that listens on `address` from now on; it imports torch meanwhile."""
        # It is given its sockets: no moment in which nobody listens yet, and no handshake to wait for.
        with contextlib.ExitStack() as undo, wire.listen(address) as door, open(log, "ab") as file:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(theirs.close)
            fds = (door.fileno(), theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.launch.nursery", *map(str, fds), str(log)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**environment, SECRET: secret.hex()},
                pass_fds=fds,
                start_new_session=True,
            )
            undo.pop_all()
            theirs.close()
        return Nursery(ours, process)

    @staticmethod
    def connect(address: str, secret: bytes, patience_s: float = 30.0) -> Nursery:
        """For an agent that takes over. OSError if no nursery listens there (any more), or it says nothing for so long: it is
        frozen, or still imports from a slow disk."""
        return Nursery(wire.connect(address, secret, patience_s))

    def fileno(self) -> int:
        return self._socket.fileno()

    def pidfd(self) -> int:
        """Of one that was started here, for whoever calls."""
        return os.dup(self._pidfd)

    @property
    def alive(self) -> bool:
        """Whether its process runs, as far as is known: a connection knows the process once it is `Ready`."""
        return self.fileno() >= 0 and (self._pidfd < 0 or not _readable(self._pidfd, 0.0))

    @property
    def failed(self) -> bool:
        """Whether it has ended by itself with an error, as far as whoever started it can know."""
        if self._process is None or not _readable(self._pidfd, _QUIT_S):
            return False
        return self._process.wait() > 0

    def ask(self, fork: Fork) -> None:
        """Have a worker made; `Born` (or `Refused`) follows. A nursery that has gone says so by `Closed`."""
        self._request(fork)

    def ask_for_children(self) -> None:
        """`Born` and `Exited` follow for every worker ever made, then `Told`."""
        self._request(Children())

    def on_ready(self) -> list[Event]:
        """What has been said since; call it when the connection is readable."""
        events: list[Event] = []
        while _readable(self.fileno(), 0.0):
            try:
                message, fds = wire.receive(self._socket, _REPORT)
            except (OSError, ValueError):
                events.append(Closed())
                break
            events.append(self._event(message, fds))
        return events

    def quit(self) -> None:
        """End the nursery, and its workers if there are any left."""
        self._send(Quit())
        while self._pidfd < 0 and _readable(self.fileno(), _QUIT_S):
            if any(isinstance(event, Closed) for event in self.on_ready()):
                break  # it has ended before it had said which process it is
        if self._pidfd >= 0 and not _readable(self._pidfd, _QUIT_S):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self.close()

    def close(self) -> None:
        """Leave it to others."""
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _request(self, request: Fork | Children) -> None:
        if self._held is not None:
            self._held.append(request)
        else:
            self._send(request)

    def _send(self, request: Fork | Children | Quit) -> None:
        try:
            wire.send(self._socket, request)
        except OSError:
            return  # the connection is readable now, and `Closed` is what it has to say

    def _event(self, message: Ready | Forked | Refused | Exited | Told, fds: list[int]) -> Event:
        if isinstance(message, Forked):
            return Born(message.worker, message.pid, fds[0])
        if isinstance(message, Ready):
            self.pid = message.pid
            self._on_nursery_ready(fds[0])
        return message

    def _on_nursery_ready(self, pidfd: int) -> None:
        if self._pidfd < 0:
            self._pidfd = pidfd
        else:
            os.close(pidfd)
        held, self._held = self._held or [], None
        for request in held:
            self._send(request)


def end_silent(pidfd: int) -> None:
    """Kill a nursery that says nothing: it holds the address that the next one needs. Its workers live on."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    _readable(pidfd, _QUIT_S)


def _readable(fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
