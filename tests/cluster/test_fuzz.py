"""Noise from a seed, at everything that reads from a socket: refused, and nothing else happens.

Twenty thousand messages here; `python -m benchmarks.flood --messages 1000000` is the full set, at a run.
"""

from __future__ import annotations

import random
import secrets
import socket
import time
from typing import get_args

import pytest

from benchmarks.noise import noise
from paceline.wires import door as door_module
from paceline.wires import messages, wire
from paceline.wires.connection import Connection
from paceline.wires.door import Door
from paceline.wires.handshake import Gate, Knock, Verdict
from tests.cluster.visitors import SECRET, serve_refusals, stranger

KINDS = get_args(messages.Message)


def test_the_decoder_knows_two_ends(seed: int) -> None:
    """A message or a ValueError; a process that serves catches nothing else."""
    dice, refused = random.Random(seed), 0
    for _ in range(8000):
        try:
            assert isinstance(wire.decode(noise(dice)[4:], messages.ANY), KINDS)
        except ValueError:
            refused += 1
    assert refused > 4000


def test_a_connection_ends_or_goes_on(seed: int) -> None:
    dice, foul = random.Random(seed), 0
    for _ in range(4000):
        ours, theirs = socket.socketpair()
        connection = Connection(ours, messages.ANY)
        theirs.sendall(wire.encode(messages.Done()) + noise(dice) + noise(dice))
        found = connection.receive()
        assert found[0].message == messages.Done()
        assert all(isinstance(received.message, KINDS) for received in found)
        foul += connection.ended is not None
        theirs.close()
        while connection.ended is None:
            connection.receive()
        assert connection.receive() == []
        connection.close()
    assert foul > 2000


def test_a_worker_that_hears_noise_has_an_error_it_expects(seed: int) -> None:
    dice, expected = random.Random(seed), 0
    for _ in range(2000):
        ours, theirs = socket.socketpair()
        theirs.sendall(noise(dice))
        theirs.close()
        with ours:
            try:
                while True:
                    wire.receive(ours, messages.ANY)
            except (OSError, ValueError):
                expected += 1
    assert expected == 2000


@pytest.mark.parametrize("greeted", [False, True])
def test_a_gate_stays_shut(seed: int, greeted: bool) -> None:
    dice = random.Random(seed)
    for _ in range(2000):
        gate = Gate(SECRET, dice.randbytes(32))
        if greeted:
            gate.feed(Knock(SECRET, dice.randbytes(32)).greeting)
        words = noise(dice)
        for at in range(0, len(words), 7):
            assert gate.feed(words[at : at + 7]).verdict is not Verdict.ADMITTED


def test_a_door_stays_shut_and_keeps_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_PER_S", 1e9)
    dice, address = random.Random(seed), f"paceline-test-{secrets.token_hex(8)}"
    door = Door(wire.listen(address), SECRET, time.monotonic())
    greeting = Knock(SECRET, bytes(32)).greeting
    for _ in range(40):
        visitors = [stranger(address) for _ in range(50)]
        for visitor in visitors:
            visitor.sendall(dice.choice([b"", greeting, greeting[: dice.randrange(1, 40)]]) + noise(dice))
        assert door.on_ready(time.monotonic()) == []
        for visitor in visitors:
            visitor.close()
    serve_refusals(door, 2000)
    assert door.half_open == 0 and len(door.refusals.untold()) == 1
    door.close()
