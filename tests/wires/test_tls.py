"""Between machines: nothing readable on the wire, and nobody in between. Over the loopback here."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.wires import tls, wire
from paceline.wires.connection import Connection
from paceline.wires.door import Door
from paceline.wires.messages import ANY, Hello, Value
from paceline.wires.tls import Identity
from tests.cluster.asking import Link
from tests.cluster.visitors import SECRET, hung_up, knocking, serve, serve_refusals

House = tuple[int, Door]


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture
def house(identity: Identity) -> Iterator[House]:
    server = wire.listen_tcp()
    door = Door(server, SECRET, time.monotonic(), identity)
    yield server.getsockname()[1], door
    door.close()


class Between:
    """Passes on what it hears from one side to the other, and keeps it."""

    def __init__(self, port: int, theirs: Identity | None = None) -> None:
        self.heard = bytearray()
        self._server, self._port, self._theirs = wire.listen_tcp(), port, theirs
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        """With a certificate of its own it ends the TLS of both sides, and hears everything."""
        visitor, _ = self._server.accept()
        onward = socket.create_connection(("127.0.0.1", self._port))
        with contextlib.suppress(OSError):
            if self._theirs is not None:
                visitor = self._theirs.wrap(visitor)
                onward, _ = tls.secure(onward)
            back = threading.Thread(target=self._pump, args=(onward, visitor))
            back.start()
            self._pump(visitor, onward)
            back.join()
        visitor.close()
        onward.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.heard += piece
                target.sendall(piece)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._server.close()


def test_messages_pass_and_an_eavesdropper_reads_nothing(house: House) -> None:
    between = Between(house[0])
    long = Value("this is told to nobody else " * 10_000)
    answers: list[object] = []

    def visit() -> None:
        link = Link(f"tls://127.0.0.1:{between.port}", SECRET, ANY)
        answers.append(link.ask(Hello(7, 4711))[0])
        answers.append(link.ask(long)[0])
        link.close()

    visitor = threading.Thread(target=visit)
    visitor.start()
    (arrival,) = serve(house[1], 1)
    connection = Connection(arrival.socket, ANY, arrival.source)
    _echo(connection, 2)
    visitor.join()
    connection.close()
    between.end()
    assert answers == [Hello(7, 4711), long]
    assert len(between.heard) > 500_000
    assert not any(word in between.heard for word in (b"PACELN", b"Hello", b"nobody"))


def _echo(connection: Connection, count: int) -> None:
    """Serve until so many messages have gone back and the other side has left."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, connection.events)
        while connection.ended is None:
            assert selector.select(10)
            for received in connection.receive():
                connection.send(received.message)
                count -= 1
            connection.flush()
            selector.modify(connection, connection.events)
    assert count == 0 and not connection.ended.foul


def test_one_in_between_with_another_certificate_is_found_out(house: House) -> None:
    """It relays the whole handshake faithfully, but its certificate is in the visitor's proof."""
    between = Between(house[0], Identity.make())
    with knocking(f"tls://127.0.0.1:{between.port}") as inside:
        serve_refusals(house[1], 1)
    between.end()
    assert not inside
    assert b"PACELN" in between.heard, "it was in between"
    assert house[1].refusals.untold()[0].why == "it does not know the run's secret"


def test_a_wrong_secret_is_refused_inside_tls(house: House) -> None:
    with knocking(f"tls://127.0.0.1:{house[0]}", bytes(32)) as inside:
        serve_refusals(house[1], 1)
    assert not inside


@pytest.mark.parametrize("words", [b"PACELN\n\x01" + bytes(32), b"\x16\x03\x01\xff\xff" + bytes(300), b"GET /"])
def test_one_who_speaks_no_tls_is_refused(house: House, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", house[0]), 10) as visitor:
        visitor.sendall(words)
        visitor.shutdown(socket.SHUT_WR)
        serve_refusals(house[1], 1)
        assert hung_up(visitor)


def test_a_silent_one_inside_tls_stops_nobody(house: House) -> None:
    with socket.create_connection(("127.0.0.1", house[0]), 10), knocking(f"tls://127.0.0.1:{house[0]}") as inside:
        (arrival,) = serve(house[1], 1)
    assert inside
    arrival.socket.close()


def test_without_tls_nobody_is_talked_to_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with wire.listen_tcp() as server:
        monkeypatch.setattr(wire, "is_loopback", lambda address: False)
        with pytest.raises(wire.ConnectionClosed, match="another machine: TLS is needed"):
            wire.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", SECRET)


def test_a_certificate_of_the_users_own(tmp_path: Path, house: House) -> None:
    certificate, key = tls._self_signed()
    other, _ = tls._self_signed()
    (tmp_path / "cert.pem").write_bytes(b"a chain, with words around it\n" + certificate + other)
    (tmp_path / "key.pem").write_bytes(key)
    server = wire.listen_tcp()
    door = Door(server, SECRET, time.monotonic(), Identity.load(tmp_path / "cert.pem", tmp_path / "key.pem"))
    with knocking(f"tls://127.0.0.1:{server.getsockname()[1]}") as inside:
        (arrival,) = serve(door, 1)
    assert inside
    arrival.socket.close()
    door.close()
    (tmp_path / "cert.pem").write_bytes(other)
    with pytest.raises(UsageError, match="cannot use the certificate"):
        Identity.load(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[cluster\]'"):
        Identity.make()
