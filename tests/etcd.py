"""The real etcd server for tests: found or fetched, started on this machine's loopback or in namespaces, stopped.

    with Etcd() as etcd: ...              # one server
    with Etcd(3) as etcd:                 # three
        etcd.servers[0].freeze()

A test that needs it and cannot have it fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_READY_S = 30.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline-tests" / "etcd-server"
_PORTS = range(20000, 32000)
"""Below those that the kernel gives to outgoing connections."""

Popen = Callable[..., "subprocess.Popen[bytes]"]


def binary() -> Path:
    """Where etcd is: installed, or unpacked from Debian's package, which needs no root."""
    if installed := shutil.which("etcd"):
        return Path(installed)
    if not (unpacked := _CACHE / "usr" / "bin" / "etcd").exists():
        with tempfile.TemporaryDirectory() as folder:
            _fetch(Path(folder))
    return unpacked


def _fetch(folder: Path) -> None:
    try:
        subprocess.run(["apt-get", "download", "etcd-server"], cwd=folder, check=True, capture_output=True)
        (package,) = folder.glob("etcd-server_*.deb")
        subprocess.run(["dpkg", "-x", package, folder / "etcd"], check=True, capture_output=True)
        _CACHE.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another session was faster
            shutil.copytree(folder / "etcd", _CACHE)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        raise RuntimeError(
            "etcd is not there and could not be fetched: `apt-get install etcd-server` brings it "
            f"({said.decode(errors='replace').strip()[-300:]})"
        ) from None


class Server:
    """One etcd server; it can be killed, started again, frozen."""

    def __init__(self, folder: Path, name: str, host: str, ports: tuple[int, int], popen: Popen) -> None:
        self.name, self.host, (self.port, self._peer_port) = name, host, ports
        self._folder, self._popen = folder, popen
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: socket.socket | None = None

    @property
    def peer(self) -> str:
        return f"http://{self.host}:{self._peer_port}"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, cluster: str, flags: Sequence[str]) -> None:
        """Begin to start: with others to meet, nobody is ready before most are there."""
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify = self._folder / f"{self.name}.ready"
        notify.unlink(missing_ok=True)
        self._ready.bind(str(notify))
        client = f"{'https' if '--cert-file' in flags else 'http'}://{self.endpoint}"
        command = [
            *("setpriv", "--pdeathsig", "KILL"),  # a killed test session leaves none behind
            *(str(binary()), "--name", self.name, "--data-dir", str(self._folder / self.name)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", cluster, "--unsafe-no-fsync", "--log-level", "warn"),
            *("--pre-vote", *flags),  # else a server that was cut off takes the others' leader away when it comes back
        ]
        with open(self.log, "ab") as log:
            environment = {**os.environ, "NOTIFY_SOCKET": str(notify)}
            self._process = self._popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Until it says, as to systemd, that it serves."""
        assert self._process is not None and self._ready is not None
        ended = os.pidfd_open(self._process.pid)
        try:
            ready, _, _ = select.select([self._ready, ended], [], [], _READY_S)
            if self._ready not in ready:
                raise RuntimeError(f"etcd {self.name} did not start:\n{self.log.read_text()[-2000:]}")
        finally:
            os.close(ended)
            self._ready.close()

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def stop(self, by: signal.Signals = signal.SIGKILL) -> None:
        """Killed, unless told otherwise: its data is safe, and a graceful end waits for its peers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(by)
            self._process.wait()
            self._process = None
        if self._ready is not None:
            self._ready.close()

    def freeze(self) -> None:
        """Until every thread of it has stopped: one that has not yet may still answer."""
        os.kill(self.pid, signal.SIGSTOP)
        while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in self._threads()):
            time.sleep(0.001)

    def _threads(self) -> list[Path]:
        return list(Path(f"/proc/{self.pid}/task").glob("*/stat"))

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Etcd:
    """A cluster of servers (or one), all on this machine, or each on one of `hosts` where `popens` start processes."""

    def __init__(
        self, count: int = 1, hosts: Sequence[str] = (), popens: Sequence[Popen] = (), flags: Sequence[str] = ()
    ) -> None:
        root = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        _remove_left_over(root)
        self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-etcd-{os.getpid()}-", dir=root))
        self._flags = flags
        ports = [(2379, 2380)] * count if hosts else list(zip(*[_free_ports(2 * count)] * 2, strict=True))
        self.servers = [
            Server(self._folder, f"s{k}", host, ports[k], popen)
            for k, host, popen in zip(
                range(count), hosts or ["127.0.0.1"] * count, popens or [subprocess.Popen] * count, strict=True
            )
        ]
        self._cluster = ",".join(f"{server.name}={server.peer}" for server in self.servers)

    @property
    def address(self) -> str:
        return ("etcds://" if "--cert-file" in self._flags else "etcd://") + ",".join(
            server.endpoint for server in self.servers
        )

    def start(self, *servers: Server) -> None:
        """These, or all; they serve when this returns."""
        for server in servers or self.servers:
            server.start(self._cluster, self._flags)
        for server in servers or self.servers:
            server.wait()

    def leader(self) -> Server:
        """The server that leads the cluster, as the first that is asked says."""
        from paceline.cluster.gateway import Address, Gateway

        gateway, by_id = Gateway(Address.parse(self.address)), {}
        try:
            for member in gateway.ask("cluster/member/list", {})["members"]:
                by_id[member["ID"]] = member["name"]
            leader = by_id[gateway.ask("maintenance/status", {})["leader"]]
        finally:
            gateway.close()
        return next(server for server in self.servers if server.name == leader)

    def __enter__(self) -> Etcd:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        shutil.rmtree(self._folder)


def _remove_left_over(root: Path) -> None:
    """What test sessions that were killed have left: their servers died with them."""
    for folder in root.glob("paceline-etcd-*-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> Iterator[int]:
    """Ports nobody listens on. Drawn apart from the tests' seed: two sessions must not draw the same ones."""
    draw, found = random.SystemRandom(), []
    deadline = time.monotonic() + _READY_S
    while len(found) < count and time.monotonic() < deadline:
        port = draw.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            found.append(port)
    return iter(found)
