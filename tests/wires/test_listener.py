"""A worker's door for other workers: calls wait for their group, strangers and nonsense are sent away."""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from paceline.wires import calling, listener, wire
from paceline.wires.calling import call
from paceline.wires.listener import Call, Listener
from paceline.wires.tls import Identity
from tests.cluster.visitors import PATIENCE_S, SECRET, hung_up


class Heal(msgspec.Struct, tag=True):
    """Another kind of label."""

    worker: int


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture(params=["tcp", "tls"])
def door(request: pytest.FixtureRequest, identity: Identity) -> Iterator[Listener]:
    found = Listener("127.0.0.1", SECRET, identity if request.param == "tls" else None)
    assert found.address.startswith(f"{request.param}://127.0.0.1:")
    yield found
    found.close()


def ring(address: str, label: msgspec.Struct, secret: bytes = SECRET) -> socket.socket:
    """Drive a call to its end; the connection blocks from there on."""
    calling_it = call(address, secret, label)
    with selectors.DefaultSelector() as selector:
        while True:
            try:
                fd, events = next(calling_it)
            except StopIteration as end:
                end.value.settimeout(PATIENCE_S)
                return end.value
            key = selector.register(fd, selectors.EVENT_READ if events & 1 else selectors.EVENT_WRITE)
            assert selector.select(PATIENCE_S), "nobody answers"
            selector.unregister(key.fileobj)


def in_time() -> Callable[[], None]:
    deadline = time.monotonic() + PATIENCE_S

    def check() -> None:
        assert time.monotonic() < deadline, "nobody called"

    return check


def take(door: Listener, label: Call) -> socket.socket:
    sock = door.take(label, in_time())
    sock.settimeout(PATIENCE_S)
    return sock


def test_a_call_is_given_to_whoever_waits_for_its_label(door: Listener) -> None:
    with ring(door.address, Call("group-1", 2)) as caller, take(door, Call("group-1", 2)) as taken:
        caller.sendall(b"hello")
        assert taken.recv(5) == b"hello"
        taken.sendall(b"you too")
        assert caller.recv(7) == b"you too"


def test_calls_wait_for_their_group_however_early_they_come(door: Listener) -> None:
    labels = [Call("group-9", 1), Call("group-2", 1), Call("group-2", 3)]
    callers = [ring(door.address, label) for label in labels]
    for caller, label in zip(callers, labels, strict=True):
        caller.sendall(repr(label).encode())
    for caller, label in reversed(list(zip(callers, labels, strict=True))):
        with take(door, label) as taken:
            assert taken.recv(100) == repr(label).encode()
        caller.close()


def test_nothing_behind_the_label_is_read(door: Listener) -> None:
    """What the caller says next is for its group, even if it comes in one piece with the label."""
    long = bytes(range(256)) * 100
    with wire.connect(door.address, SECRET) as caller:
        caller.sendall(wire.encode(Call("group-1", 1)) + long)
        with take(door, Call("group-1", 1)) as taken:
            heard = b""
            while len(heard) < len(long):
                heard += taken.recv(len(long))
    assert heard == long


def test_the_watch_ends_a_wait(door: Listener) -> None:
    calls = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise KeyError

    before = time.monotonic()
    with pytest.raises(KeyError):
        door.take(Call("group-1", 0), check)
    assert calls[-1] - before < 1.0


def test_the_calls_of_a_group_that_is_over_are_dropped(door: Listener) -> None:
    with ring(door.address, Call("old", 1)) as early, ring(door.address, Call("new", 1)):
        take(door, Call("new", 1)).close()  # the thread has seen both
        door.forget("old")
        assert hung_up(early)
    with ring(door.address, Call("old", 1)) as late:
        assert hung_up(late)


def test_a_second_call_by_the_same_label_counts(door: Listener) -> None:
    """Its caller has given the first one up."""
    with ring(door.address, Call("group", 1)) as first, ring(door.address, Call("group", 1)) as second:
        assert hung_up(first)
        second.sendall(b"2")
        with take(door, Call("group", 1)) as taken:
            assert taken.recv(1) == b"2"


def test_the_oldest_is_dropped_when_too_many_wait(door: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_PARKED", 3)
    callers = [ring(door.address, Call("group", rank)) for rank in range(4)]
    assert hung_up(callers[0])
    for rank in (1, 2, 3):
        take(door, Call("group", rank)).close()
    for caller in callers:
        caller.close()


# strangers and nonsense


def test_a_wrong_secret_is_told_nothing(door: Listener) -> None:
    with pytest.raises(OSError, match=r"handshake|reset|EOF"):
        ring(door.address, Call("group", 1), bytes(32))
    assert_open(door)


def wait_for_words(capfd: pytest.CaptureFixture[str], words: str) -> None:
    """The listener's thread says them when it has done everything else."""
    said, deadline = "", time.monotonic() + PATIENCE_S
    while words not in (said := said + capfd.readouterr().err):
        assert time.monotonic() < deadline, f"{words!r} is not in {said!r}"
        time.sleep(0.001)


class Full:
    """A log on a full disk."""

    def __init__(self) -> None:
        self.written = threading.Event()

    def write(self, words: str) -> int:
        self.written.set()
        raise OSError(errno.ENOSPC, "No space left on device")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Of the log, from here on: between a fixture and its test pytest puts its own there. Set when something was written."""
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    return full.written


def test_a_log_on_a_full_disk_does_not_close_the_door(door: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fill_the_disk(monkeypatch)
    with wire.connect(door.address, SECRET) as guest:
        guest.sendall(b"\xff\xff\xff\x7f")
        assert hung_up(guest)
    assert written.wait(PATIENCE_S)
    assert_open(door)


def test_nor_does_it_where_a_handlers_mistake_is_written_there(door: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fill_the_disk(monkeypatch)

    def wrong(label: Heal, sock: socket.socket) -> None:
        raise KeyError("a mistake")

    door.serve(Heal, wrong)
    with ring(door.address, Heal(3)) as guest:
        assert hung_up(guest)
    assert written.wait(PATIENCE_S)
    assert_open(door)


def assert_open(door: Listener) -> None:
    with ring(door.address, Call("still", 0)), take(door, Call("still", 0)):
        pass


@pytest.mark.parametrize(
    "words",
    [
        wire.encode(Heal(3)),
        b"\xff\xff\xff\x7f",
        wire.LENGTH.pack(3) + b"\xc1\xc1\xc1",
        wire.LENGTH.pack(0),
    ],
    ids=["unknown", "too long", "nonsense", "nothing"],
)
def test_who_has_no_proper_label_is_sent_away(door: Listener, words: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with wire.connect(door.address, SECRET) as guest:
        guest.settimeout(PATIENCE_S)
        guest.sendall(words)
        assert hung_up(guest)
    assert_open(door)
    wait_for_words(capfd, "refused a connection from 127.0.0.1")


def test_who_says_nothing_is_sent_away(door: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.05)
    with wire.connect(door.address, SECRET) as guest:
        guest.settimeout(PATIENCE_S)
        assert hung_up(guest)
    assert_open(door)


def test_a_stranger_holds_nobody_up(door: Listener) -> None:
    place = door.address.partition("://")[2].rpartition(":")
    strangers = [socket.create_connection((place[0], int(place[2]))) for _ in range(10)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert_open(door)
    for stranger in strangers:
        stranger.close()


def test_no_call_to_another_machine_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with wire.listen_tcp() as server:
        monkeypatch.setattr(wire, "is_loopback", lambda address: False)
        with pytest.raises(wire.ConnectionClosed, match="another machine: TLS is needed"):
            ring(f"tcp://127.0.0.1:{server.getsockname()[1]}", Call("group", 0))


# other kinds of labels


def test_another_kind_of_label_goes_to_whoever_serves_it(door: Listener) -> None:
    served: list[int] = []

    def handler(label: Heal, sock: socket.socket) -> None:
        served.append(label.worker)
        sock.send(b"state")
        sock.close()

    door.serve(Heal, handler)
    with ring(door.address, Heal(7)) as newcomer:
        assert newcomer.recv(100) == b"state"
    assert served == [7]
    assert_open(door)


def test_the_door_outlives_a_handler_that_fails(door: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    def handler(label: Heal, sock: socket.socket) -> None:
        raise RuntimeError("no state here")

    door.serve(Heal, handler)
    with ring(door.address, Heal(7)) as newcomer:
        assert hung_up(newcomer)
    assert_open(door)
    wait_for_words(capfd, "no state here")


# its life


def test_closing_ends_every_wait_and_every_connection(door: Listener) -> None:
    ended = []

    def wait() -> None:
        with pytest.raises(wire.ConnectionClosed):
            door.take(Call("group", 5), in_time())
        ended.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    with ring(door.address, Call("group", 1)) as parked, wire.connect(door.address, SECRET) as silent:
        door.close()
        waiter.join(PATIENCE_S)
        assert ended
        for sock in (parked, silent):
            sock.settimeout(PATIENCE_S)
            assert hung_up(sock)
    door.close()


def test_a_dropped_call_leaves_nothing_open(door: Listener) -> None:
    for steps in (1, 2):
        dropped = call(door.address, SECRET, Call("group", 1))
        try:
            for _ in range(steps):
                next(dropped)
        except StopIteration as done:  # the other side was quicker than the steps
            done.value.close()
        dropped.close()
    assert_open(door)


def test_a_call_that_nobody_answers_is_an_error() -> None:
    with wire.listen_tcp() as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        ring(f"tcp://127.0.0.1:{port}", Call("group", 0))


def own_address() -> str:
    """One that other machines reach, if this machine has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("203.0.113.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback one")
        return str(sock.getsockname()[0])


def test_an_address_for_other_machines_is_under_tls() -> None:
    door = Listener(own_address(), SECRET)
    assert door.address.startswith(f"tls://{own_address()}:")
    with ring(door.address, Call("group", 1)) as caller, take(door, Call("group", 1)) as taken:
        taken.sendall(b"hello")
        assert caller.recv(5) == b"hello"
    door.close()


def test_a_connection_bears_a_cable_that_is_cut_for_a_while(door: Listener) -> None:
    with ring(door.address, Call("group", 1)) as caller, take(door, Call("group", 1)) as taken:
        for sock in (caller, taken):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == calling._GIVE_UP_S * 1000 > 10_000
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
