"""The nursery: a process that has imported torch once, and forks workers that therefore start in milliseconds.

It outlives the agent that started it and serves whichever leads after it. What makes a fork safe: no
threads, no CUDA call, no TCPStore (a process that has opened one hangs after a fork, measured), and no
signal handler to undo. One loop, that waits for no client: the door is kept by forks of their own.

No torch at the top: the sockets are taken over before it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass

import msgspec

from paceline.launch import newborn
from paceline.launch.nursing import REQUEST, SECRET, Children, Exited, Fork, Forked, Quit, Ready, Refused, Told
from paceline.wires import wire

PREPARED = (
    "numpy.random",
    "torch",
    "torch.utils.data",
    # The first optimizer would import it: half of a worker's start (measured).
    "torch._dynamo",
    "safetensors.torch",
    "paceline.run",
    "paceline.fitting",
    "paceline.strategies.allreduce",
    "paceline.tensors.group",
    "paceline.tensors.shared",
)
"""What a worker needs on the common path to its first step. None of it may call CUDA or start a thread."""
_ORPHANED_S = 5.0
"""With no client and no living worker for this long, nobody will come."""
_ADMISSION_S = 5.0
_CLIENT_S = 1.0
"""A client that stops in the middle of a message, or does not read, is dropped after this long."""


def main() -> None:
    """`python -m paceline.launch.nursery DOOR STARTER LOG`: the numbers of the listening and of the first socket;
    the log is for whoever lists processes: workers keep this command line."""
    secret = bytes.fromhex(os.environ.pop(SECRET))
    door, starter = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for sock in (door, starter):
        sock.set_inheritable(False)
    prepare()
    nursery = Nursery(door, secret)
    nursery.welcome(starter)
    nursery.serve()
    os._exit(0)  # there is nothing to tidy, and to take torch apart costs a quarter of a second


def prepare() -> None:
    """Import what workers need, and make sure that a fork is safe afterwards."""
    path = list(sys.path)
    sys.path = [folder for folder in path if folder not in ("", os.getcwd())]  # the script's own files are not for us
    # What is imported stays: to look for garbage in it, even once, is a quarter of the time (measured). A worker's
    # collections then leave these pages alone, which it shares with us.
    gc.disable()
    for name in PREPARED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    sys.path = path
    # What the imports have freed would come to the workers as small pages to be copied one by one.
    ctypes.CDLL(None).malloc_trim(0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    # Only now: OpenBLAS has started its threads by itself, and ends them itself at a fork.
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"after importing {', '.join(PREPARED)} there are {threads} threads: a fork would be unsafe")


@dataclass
class Child:
    pid: int
    pidfd: int
    """Kept after the end too: whoever asks later gets one that says so."""
    status: int | None = None


class Nursery:
    def __init__(self, door: socket.socket, secret: bytes, orphaned_s: float = _ORPHANED_S) -> None:
        self._door, self._secret, self._orphaned_s = door, secret, orphaned_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ, self._on_knock)
        self._self = os.pidfd_open(os.getpid())
        self._clients: list[socket.socket] = []
        self._knocking: dict[int, socket.socket] = {}
        """Who is at the door, by the pidfd of the process that checks them."""
        self._children: dict[int, Child] = {}
        self._ending = False

    def serve(self) -> None:
        """Until `Quit`, or until there is nobody to serve and nobody to reap."""
        while not self._ending:
            ready = self._selector.select(self._orphaned_s if self._alone() else None)
            if not ready:
                return
            for key, _ in ready:
                # A client may have been dropped on account of an earlier event of this batch.
                if key.fd in self._selector.get_map():
                    key.data(key.fileobj)

    def _alone(self) -> bool:
        living = any(child.status is None for child in self._children.values())
        return not (self._clients or self._knocking or living)

    # clients

    def _on_knock(self, door: socket.socket) -> None:
        """Someone is at the door. A process of their own checks them: whoever says nothing holds up nobody."""
        sock, _ = door.accept()
        sock.settimeout(_ADMISSION_S)
        try:
            pid = os.fork()
        except OSError:  # too many processes, or no memory: they may try again
            sock.close()
            return
        if pid == 0:
            self._check(sock)
        pidfd = os.pidfd_open(pid)
        self._knocking[pidfd] = sock
        self._selector.register(pidfd, selectors.EVENT_READ, lambda fd: self._on_checked(fd, pid))

    def _check(self, sock: socket.socket) -> None:
        admitted = False
        try:
            self._leave()
            admitted = wire.admit(sock, self._secret)
        finally:
            os._exit(0 if admitted else 1)

    def _on_checked(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        sock = self._knocking.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            self.welcome(sock)
        else:
            sock.close()

    def welcome(self, sock: socket.socket) -> None:
        """Serve this client from now on."""
        sock.settimeout(_CLIENT_S)
        self._clients.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, self._on_message)
        self._tell(sock, Ready(os.getpid()), self._self)

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._clients:
            self._clients.remove(sock)
            self._selector.unregister(sock)
            sock.close()

    def _tell(self, sock: socket.socket, message: msgspec.Struct, *fds: int) -> None:
        try:
            wire.send(sock, message, fds)
        except OSError:
            self._drop(sock)

    def _on_message(self, sock: socket.socket) -> None:
        try:
            message, fds = wire.receive(sock, REQUEST)
        except (OSError, ValueError):
            self._drop(sock)
            return
        for fd in fds:
            os.close(fd)
        self._answer(sock, message)

    def _answer(self, sock: socket.socket, message: Fork | Children | Quit) -> None:
        match message:
            case Fork():
                try:
                    child = self._children.get(message.worker) or self._fork(message)
                except OSError as error:
                    self._tell(sock, Refused(message.worker, str(error)))
                else:
                    self._introduce(sock, message.worker, child)
            case Children():
                for worker, child in self._children.items():
                    self._introduce(sock, worker, child)
                self._tell(sock, Told())
            case Quit():
                self._ending = True
                for child in self._children.values():
                    if child.status is None:
                        _kill_group(child.pid)  # it was asked for, and not needed any more when it came

    def _introduce(self, sock: socket.socket, worker: int, child: Child) -> None:
        self._tell(sock, Forked(worker, child.pid), child.pidfd)
        if child.status is not None:
            self._tell(sock, Exited(worker, child.status))

    # workers

    def _fork(self, fork: Fork) -> Child:
        log = os.open(fork.log, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if fork.append else os.O_TRUNC), 0o666)
        try:
            pid = os.fork()
            if pid == 0:
                newborn.live(fork, log, self._leave)
        finally:
            os.close(log)
        child = self._children[fork.worker] = Child(pid, os.pidfd_open(pid))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda _: self._on_exit(fork.worker))
        return child

    def _on_exit(self, worker: int) -> None:
        child = self._children[worker]
        self._selector.unregister(child.pidfd)
        _kill_group(child.pid)  # its loader processes: until it is reaped, the group is its own
        _, raw = os.waitpid(child.pid, 0)
        child.status = os.waitstatus_to_exitcode(raw)
        for sock in list(self._clients):
            self._tell(sock, Exited(worker, child.status))

    def _leave(self) -> None:
        """In a fork: close what is the nursery's own."""
        self._selector.close()
        self._door.close()
        for sock in self._clients:
            sock.close()
        for pidfd, sock in self._knocking.items():
            os.close(pidfd)
            sock.close()
        for child in self._children.values():
            os.close(child.pidfd)
        os.close(self._self)


def _kill_group(leader: int) -> None:
    """A worker's process group; just after its fork it has none of its own yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(leader, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main()
