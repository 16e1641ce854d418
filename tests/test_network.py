"""The network of the tests itself: cables that carry, are pulled, mended and thin, and nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.network import Machine, Network, spaces

pytestmark = pytest.mark.needs_root


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def _connect(one: Machine, two: Machine) -> tuple[socket.socket, socket.socket]:
    """A TCP connection, both its ends in the test's hands."""
    with one.inside():
        door = socket.create_server((one.address, 0))
    with closing(door), two.inside():
        near = socket.create_connection(door.getsockname(), timeout=30)
        far, _ = door.accept()
        far.settimeout(30)
        return near, far


def test_machines_reach_each_other_and_nobody_else(network: Network) -> None:
    one, two, three = network.machines
    for near, far in (_connect(one, two), _connect(two, three)):
        with near, far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
    assert "10.77.0.2" in two.run(["ip", "-o", "address"])
    assert two.run(["ip", "-o", "link"]).count("\n") == 2, "a loopback device and a cable"
    assert "10.77." not in subprocess.run(["ip", "-o", "address"], capture_output=True, text=True).stdout
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0paceline-network-test'); print('bound')"
    assert one.run([sys.executable, "-c", code]) == two.run([sys.executable, "-c", code]) == "bound\n"


def test_a_pulled_cable_and_the_same_connection_afterwards(network: Network) -> None:
    one, two, three = network.machines
    (near, far), (other, another) = _connect(one, two), _connect(one, three)
    with near, far, other, another:
        near.sendall(b"before")
        assert far.recv(100) == b"before"
        two.cut()
        near.sendall(b"while it is cut")
        other.sendall(b"another cable")
        assert another.recv(100) == b"another cable"
        assert not select.select([far], [], [], 0.5)[0], "what the kernel sent again and again has not come"
        two.mend()
        assert far.recv(100) == b"while it is cut"


def test_a_thin_cable(network: Network) -> None:
    """What has come took at least as long as the cable needs for it; a busy machine only makes it longer."""
    one, two, _ = network.machines
    near, far = _connect(one, two)
    payload = bytes(1_500_000)
    for thin in (one, two):  # the sender's end, then the receiver's
        thin.thin("8mbit")
        sender = threading.Thread(target=near.sendall, args=(payload,))
        began, got = time.monotonic(), 0
        sender.start()
        while got < len(payload):
            got += len(far.recv(1 << 16))
        took_s = time.monotonic() - began
        sender.join()
        assert took_s > (len(payload) - 200_000) / 1_000_000, f"8 Mbit/s are 1 MB/s: {got} bytes took {took_s:.2f} s"
        thin.widen()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    near.close()
    far.close()


def test_nothing_is_left_not_even_of_processes_that_will_not_end() -> None:
    with pytest.raises(ZeroDivisionError), Network(2) as network:
        assert len(spaces(os.getpid())) == 3
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
        process = network.machine(2).popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        process.stdout.close()
        raise ZeroDivisionError
    assert spaces(os.getpid()) == [] and process.returncode == -signal.SIGKILL


def test_what_a_killed_session_has_left_goes_with_the_next() -> None:
    code = (
        "import signal; from tests.network import Network; network = Network(2)\n"
        "sleeper = network.machine(1).popen(['sleep', '1000'], start_new_session=True)\n"
        "print(sleeper.pid, flush=True); signal.pause()"
    )
    session = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert session.stdout is not None
    said = session.stdout.readline()
    left = spaces(session.pid)
    session.kill()
    session.wait()
    session.stdout.close()
    sleeper = os.pidfd_open(int(said))
    assert len(left) == 3
    Network(1).close()
    assert spaces(session.pid) == []
    assert select.select([sleeper], [], [], 10)[0], "its processes are gone too"
    os.close(sleeper)
