"""The door: those with the secret come in, whatever the others do meanwhile."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wires import door as door_module
from paceline.wires import wire
from paceline.wires.door import Door, Pace, Refusal, Refusals
from paceline.wires.handshake import GREETING_BYTES, Knock
from paceline.wires.messages import ANY, Done
from tests.cluster.visitors import SECRET, greeting, hung_up, knocking, serve, serve_refusals, stranger

House = tuple[str, Door]
ME = f"process {os.getpid()} of user {os.getuid()}"


@pytest.fixture
def house() -> Iterator[House]:
    address = f"paceline-test-{secrets.token_hex(8)}"
    door = Door(wire.listen(address), SECRET, time.monotonic())
    yield address, door
    door.close()


def test_those_with_the_secret_come_in_and_can_speak(house: House) -> None:
    with knocking(house[0]) as first, knocking(house[0]) as second:
        arrivals = serve(house[1], 2)
    assert len(first) == len(second) == 1
    assert [arrival.source for arrival in arrivals] == [ME] * 2
    assert house[1].half_open == 0 and not house[1].refusals.counts
    for arrival in arrivals:
        arrival.socket.close()


def test_what_is_said_after_the_handshake_is_left_for_the_reader(house: House) -> None:
    with stranger(house[0]) as visitor:
        knock = Knock(SECRET, bytes(32))
        visitor.sendall(knock.greeting)
        house[1].on_ready(time.monotonic())
        proof = knock.feed(visitor.recv(GREETING_BYTES)).reply
        visitor.sendall(proof + wire.encode(Done()))
        (eager,) = serve(house[1], 1)
        eager.socket.setblocking(True)
        assert wire.receive(eager.socket, ANY) == (Done(), [])
        eager.socket.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it does not speak Paceline"),
        (greeting() + bytes(32), "it does not know the run's secret"),
        (b"PACELN\n\x07", "it speaks version 7 of the handshake, this run 1"),
    ],
    ids=["stranger", "wrong secret", "version"],
)
def test_others_are_sent_away_without_a_word(house: House, words: bytes, why: str) -> None:
    with stranger(house[0]) as visitor:
        visitor.sendall(words)
        serve_refusals(house[1], 1)
        assert hung_up(visitor)
    assert house[1].refusals.untold() == [Refusal(ME, why)]


def test_a_source_is_told_of_once_and_counted(house: House) -> None:
    for _ in range(5):
        with stranger(house[0]) as visitor:
            visitor.sendall(b"hello?")
            serve_refusals(house[1], house[1].refusals.counts.total() + 1)
    assert house[1].refusals.untold() == [Refusal(ME, "it does not speak Paceline")]
    assert house[1].refusals.untold() == []
    assert house[1].refusals.counts == {ME: 5}


def test_one_who_comes_and_goes_is_no_trouble(house: House) -> None:
    stranger(house[0]).close()
    serve_refusals(house[1], 1)
    assert house[1].refusals.untold()[0].why == "it went away in the middle of the handshake"
    assert house[1].half_open == 0


def test_a_silent_visitor_stops_nobody_and_his_time_runs_out(house: House) -> None:
    address, door = house
    with stranger(address) as silent, stranger(address) as half:
        half.sendall(greeting()[:20])
        with knocking(address) as inside:
            (arrival,) = serve(door, 1)
        assert inside and door.half_open == 2
        arrival.socket.close()
        now = time.monotonic()
        door.expire(now)
        assert door.half_open == 2, "not before its time"
        door.expire(now + wire.HANDSHAKE_S)
        assert door.half_open == 0
        assert hung_up(silent) and hung_up(half)
    assert door.refusals.untold() == [Refusal(ME, "it did not prove itself in time")]


def test_the_half_open_have_a_bound_and_the_oldest_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_HALF_OPEN", 3)
    address, door = house
    visitors = [stranger(address) for _ in range(5)]
    serve_refusals(door, 2)
    assert door.half_open == 3
    assert hung_up(visitors[0]) and hung_up(visitors[1])
    with knocking(address) as inside:
        (arrival,) = serve(door, 1)
    assert inside
    assert hung_up(visitors[2]), "it made place for one who knows the secret"
    arrival.socket.close()
    for visitor in visitors:
        visitor.close()


_HOLD = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    held[-1].connect("\\0" + sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_one_who_floods_pushes_out_his_own(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of all is ours and half done; the flooder is another process, with many."""
    monkeypatch.setattr(door_module, "_HALF_OPEN", 4)
    address, door = house
    with stranger(address) as ours:
        knock = Knock(SECRET, bytes(32))
        ours.sendall(knock.greeting)
        door.on_ready(time.monotonic())
        command = [sys.executable, "-c", _HOLD, address, "10"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flooder:
            assert flooder.stdout is not None
            assert flooder.stdout.readline() == b"ready\n"
            serve_refusals(door, 7)
            ours.sendall(knock.feed(ours.recv(GREETING_BYTES)).reply)
            (arrival,) = serve(door, 1)
            assert door.refusals.counts == {f"process {flooder.pid} of user {os.getuid()}": 7}
            flooder.communicate()
        arrival.socket.close()


def test_strangers_are_heard_at_a_limited_pace(house: House) -> None:
    address, door = house
    now = time.monotonic()
    visitors = [stranger(address) for _ in range(100)]
    for visitor in visitors:
        visitor.sendall(b"x")
    door.on_ready(now)
    assert door.refusals.counts.total() == 64
    assert not select.select([door], [], [], 0)[0], "it rests: nothing wakes the loop"
    door.on_ready(now)
    assert door.refusals.counts.total() == 64
    door.expire(now + 0.02)
    assert not select.select([door], [], [], 0)[0], "ten more are not worth a round"
    door.expire(now + 0.041)
    door.on_ready(now + 0.041)
    assert door.refusals.counts.total() == 84
    door.expire(now + 10)
    door.on_ready(now + 10)
    assert door.refusals.counts.total() == 100
    for visitor in visitors:
        visitor.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused_at_once(house: House) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            wire.connect(house[0], SECRET)
        finally:
            os._exit(0)
    serve_refusals(house[1], 1)
    assert house[1].refusals.untold() == [Refusal(f"process {pid} of user 65534", "it is another user's")]
    os.waitpid(pid, 0)


def test_a_door_closes_with_visitors_inside(house: House) -> None:
    with stranger(house[0]) as visitor:
        visitor.sendall(greeting())
        house[1].on_ready(time.monotonic())
        assert house[1].half_open == 1
        house[1].close()
        assert hung_up(visitor)


def test_descriptors_beside_a_handshake_stay_outside(house: House) -> None:
    fd = os.memfd_create("paceline-test")
    with stranger(house[0]) as visitor:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(visitor, [greeting()], [fd] * 10)
        house[1].on_ready(time.monotonic())
        assert house[1].half_open == 1
        assert len(os.listdir("/proc/self/fd")) == before + 1, "the connection's own"
    os.close(fd)


def test_tcp_on_the_loopback(house: House) -> None:
    server = wire.listen_tcp()
    port = server.getsockname()[1]
    door = Door(server, SECRET, time.monotonic())
    with knocking(f"tcp://127.0.0.1:{port}") as inside:
        (arrival,) = serve(door, 1)
    assert inside and arrival.source == "127.0.0.1"
    arrival.socket.close()
    with knocking(f"tcp://127.0.0.1:{port}", bytes(32)) as outside:
        serve_refusals(door, 1)
    assert not outside
    assert door.refusals.untold() == [Refusal("127.0.0.1", "it does not know the run's secret")]
    door.close()


def test_no_door_to_other_machines_without_tls() -> None:
    with wire.listen_tcp("0.0.0.0") as server, pytest.raises(ValueError, match=r"0\.0\.0\.0 .* TLS is needed"):
        Door(server, SECRET, 0.0)


# pure parts


@given(st.lists(st.tuples(st.floats(0, 0.1), st.booleans()), max_size=200))
def test_a_pace_is_kept(moments: list[tuple[float, bool]]) -> None:
    pace, now, taken = Pace(500.0, 64, 0.0), 0.0, 0
    for passed, wants in moments:
        now += passed
        pace.pass_time(now)
        if wants and pace.may:
            pace.left -= 1
            taken += 1
        assert taken <= 64 + 500 * now + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    pace = Pace(500.0, 64, 10.0)
    pace.left = 0
    pace.pass_time(5.0)
    assert not pace.may


def test_sources_without_end_fill_no_memory() -> None:
    refusals = Refusals()
    for number in range(1000):
        refusals.note(f"process {number}", "why")
    assert len(refusals.counts) == 257 and refusals.counts["others"] == 744
    assert len(refusals.untold()) == 257
