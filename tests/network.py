"""Several machines on one kernel: network namespaces, joined by a switch that lies in one of its own.

    with Network(3) as network:
        one, two = network.machine(1), network.machine(2)
        server = one.popen(["python", "-m", "http.server"])
        two.run(["curl", f"http://{one.address}:8000"])
        one.cut()                           # the cable is pulled: sockets stay, packets vanish
        one.mend()
        two.thin("10mbit")                  # both ways

Abstract Unix sockets are a namespace's own too; the disk, /dev/shm and process numbers are shared. Needs root
(mark tests with `needs_root`). Nothing of the host's own network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"paceline-(\d+)-\d+-(switch|\d+)$")
_NUMBERS = itertools.count(1)
_NEW_NET = 0x40000000
_END_S = 10.0


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not there: `apt-get install iproute2` brings it") from None
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Machine:
    """One of the network's machines, with a loopback device and one cable to the switch."""

    def __init__(self, space: str, switch: str, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number}"
        self.space, self._switch, self._port = space, switch, f"port{number}"
        self._started: list[subprocess.Popen[Any]] = []

    def plug_in(self) -> None:
        _ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        _ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.space, "link", "set", device, "up")

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen, on this machine; the process is the command's own."""
        entered = ["nsenter", f"--net={_NAMESPACES / self.space}", "--", *command]
        self._started.append(subprocess.Popen(entered, **options))
        return self._started[-1]

    def run(self, command: Sequence[str], timeout_s: float = 60.0) -> str:
        """What the command says; an error if it fails."""
        entered = ["nsenter", f"--net={_NAMESPACES / self.space}", "--", *command]
        return subprocess.run(entered, check=True, capture_output=True, text=True, timeout=timeout_s).stdout

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is on the machine; the sockets it opens there stay there."""
        with open("/proc/thread-self/ns/net") as here, open(_NAMESPACES / self.space) as there:
            enter(there.fileno())
            try:
                yield
            finally:
                enter(here.fileno())

    def cut(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def thin(self, rate: str) -> None:
        """A thin cable: `rate` as tc writes it, each way."""
        for space, device in self._ends:
            _call(*_tc(space, "replace", device), "tbf", "rate", rate, "burst", "32kb", "latency", "100ms")

    def widen(self) -> None:
        for space, device in self._ends:
            _call(*_tc(space, "delete", device))

    @property
    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.space, "eth0"), (self._switch, self._port)

    @property
    def sent_bytes(self) -> int:
        """What has left over its cable, with all headers."""
        (device,) = json.loads(_ip("-n", self.space, "-s", "-j", "link", "show", "eth0"))
        return int(device["stats64"]["tx"]["bytes"])

    def end_processes(self) -> None:
        """Of all that run here, whoever started them."""
        _end_processes(self.space)
        for process in self._started:
            process.wait(_END_S)


class Network:
    def __init__(self, machines: int) -> None:
        if os.geteuid():
            raise RuntimeError(
                "network namespaces need root: run these tests as root, or leave them out (-m 'not needs_root')"
            )
        _remove_left_over()
        name = f"paceline-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{name}-switch"
        self.machines = [Machine(f"{name}-{k}", self._switch, k) for k in range(1, machines + 1)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for space in (self._switch, *(machine.space for machine in self.machines)):
            _ip("netns", "add", space)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for machine in self.machines:
            machine.plug_in()

    def machine(self, number: int) -> Machine:
        """From 1 on."""
        return self.machines[number - 1]

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for machine in self.machines:
            machine.end_processes()
        for space in (*(machine.space for machine in self.machines), self._switch):
            _remove(space)


def spaces(session: int | None = None) -> list[str]:
    """Every namespace of such networks, of living test sessions or left over; or those of one session."""
    found = [match for path in _NAMESPACES.glob("paceline-*") if (match := _NAME.match(path.name))]
    return sorted(match[0] for match in found if session in (None, int(match[1])))


def _remove_left_over() -> None:
    """What test sessions that were killed have left."""
    for space in spaces():
        match = _NAME.match(space)
        if match and not Path("/proc", match[1]).exists():
            with contextlib.suppress(RuntimeError):  # another session does the same
                _end_processes(space)
                _remove(space)


def _remove(space: str) -> None:
    if (_NAMESPACES / space).exists():
        _ip("netns", "delete", space)


def _end_processes(space: str) -> None:
    deadline = time.monotonic() + _END_S
    while (_NAMESPACES / space).exists() and (pids := _ip("netns", "pids", space).split()):
        if os.getpid() in map(int, pids) or time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of {space} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _tc(space: str, verb: str, device: str) -> list[str]:
    return ["tc", "-n", space, "qdisc", verb, "dev", device, "root"]


def enter(space: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, _NEW_NET):
        raise OSError(ctypes.get_errno(), "setns failed")
