"""The handshake by itself: who gets in, in whatever pieces it is said, and who does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.wires.handshake import GREETING_BYTES, NONCE_BYTES, SECRET_BYTES, Gate, Knock, Move, Verdict

secrets_ = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)
nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
SECRET, ONE, TWO = bytes(range(32)), b"1" * NONCE_BYTES, b"2" * NONCE_BYTES


def meet(knock: Knock, gate: Gate) -> tuple[Move, Move | None]:
    """The last moves of the gate and of the one who knocks, if it came to that."""
    greeted = gate.feed(knock.greeting)
    move = gate.feed(knock.feed(greeted.reply).reply)
    return move, knock.feed(move.reply) if move.reply else None


@given(secrets_, nonces, nonces, st.binary(max_size=40))
def test_those_who_share_a_secret_meet(secret: bytes, one: bytes, two: bytes, binding: bytes) -> None:
    at_gate, at_knock = meet(Knock(secret, one, binding), Gate(secret, two, binding))
    assert at_gate.verdict is Verdict.ADMITTED
    assert at_knock is not None and at_knock == Move(Verdict.ADMITTED)


@given(secrets_, secrets_, nonces, nonces)
def test_others_do_not_and_the_gate_says_nothing(mine: bytes, yours: bytes, one: bytes, two: bytes) -> None:
    assume(mine != yours)
    at_gate, _ = meet(Knock(yours, one), Gate(mine, two))
    assert at_gate == Move(Verdict.REFUSED, b"", "it does not know the run's secret")


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_those_on_different_channels_do_not(mine: bytes, yours: bytes) -> None:
    assume(mine != yours)
    assert meet(Knock(SECRET, ONE, yours), Gate(SECRET, TWO, mine))[0].verdict is Verdict.REFUSED


def test_a_gate_without_the_secret_does_not_deceive_the_one_who_knocks() -> None:
    knock, gate = Knock(SECRET, ONE), Gate(bytes(SECRET_BYTES), TWO)
    knock.feed(gate.greeting)
    assert knock.feed(bytes(32)) == Move(Verdict.REFUSED, b"", "it does not know the run's secret")


@given(st.lists(st.integers(0, GREETING_BYTES + 32), max_size=12))
def test_it_may_come_in_any_pieces(cuts: list[int]) -> None:
    knock, gate = Knock(SECRET, ONE), Gate(SECRET, TWO)
    said = knock.greeting + knock.feed(gate.greeting).reply
    heard = []
    for start, end in pairwise(sorted({0, GREETING_BYTES, len(said), *cuts})):
        move = gate.feed(said[start:end])
        heard.append(move.reply)
        assert move.verdict is (Verdict.ADMITTED if end == len(said) else Verdict.OPEN)
    assert b"".join(heard)[:GREETING_BYTES] == gate.greeting
    assert knock.feed(heard[-1]).verdict is Verdict.ADMITTED


def test_a_replay_meets_another_nonce() -> None:
    knock, gate = Knock(SECRET, ONE), Gate(SECRET, TWO)
    recorded = knock.greeting, knock.feed(gate.greeting).reply
    assert [gate.feed(piece).verdict for piece in recorded] == [Verdict.OPEN, Verdict.ADMITTED]
    later = Gate(SECRET, b"3" * NONCE_BYTES)
    assert [later.feed(piece).verdict for piece in recorded] == [Verdict.OPEN, Verdict.REFUSED]


def test_a_reflection_is_no_proof() -> None:
    """An attacker without the secret sends back what it hears, to either side, with the same nonce even."""
    knock, gate = Knock(SECRET, ONE), Gate(SECRET, TWO)
    of_knock = knock.feed(gate.greeting).reply
    assert knock.feed(of_knock).verdict is Verdict.REFUSED
    gate.feed(knock.greeting)
    of_gate = gate.feed(of_knock).reply
    again = Gate(SECRET, TWO)
    again.feed(knock.greeting)
    assert again.feed(of_gate).verdict is Verdict.REFUSED


@given(st.binary(min_size=1, max_size=GREETING_BYTES))
def test_a_strangers_first_byte_is_enough(raw: bytes) -> None:
    assume(not b"PACELN\n\x01".startswith(raw[:8]))
    move = Gate(SECRET, ONE).feed(raw)
    assert move.verdict is Verdict.REFUSED and move.reply == b""
    if raw[:1] != b"P":
        assert Gate(SECRET, ONE).feed(raw[:1]).why == "it does not speak Paceline"


def test_another_version_is_told_apart() -> None:
    assert Gate(SECRET, ONE).feed(b"PACELN\n\x02").why == "it speaks version 2 of the handshake, this run 1"


@pytest.mark.parametrize("surplus", [1, 1000])
def test_more_than_was_asked_for_is_refused(surplus: int) -> None:
    gate = Gate(SECRET, ONE)
    assert gate.feed(Knock(SECRET, TWO).greeting + bytes(surplus)).verdict is Verdict.REFUSED


def test_nothing_is_heard_after_the_verdict() -> None:
    knock, gate = Knock(SECRET, ONE), Gate(SECRET, TWO)
    assert meet(knock, gate)[0].verdict is Verdict.ADMITTED
    assert gate.feed(b"x").verdict is Verdict.REFUSED
    refused = Gate(SECRET, ONE)
    assert [refused.feed(b"x").verdict, refused.feed(b"").verdict] == [Verdict.REFUSED] * 2


@given(st.lists(st.binary(max_size=80), max_size=8))
def test_noise_never_gets_in(pieces: list[bytes]) -> None:
    gate = Gate(SECRET, ONE)
    gate.feed(Knock(SECRET, TWO).greeting)
    assert all(gate.feed(piece).verdict is not Verdict.ADMITTED for piece in pieces)


@pytest.mark.parametrize("secret", [b"", SECRET[:-1], SECRET + b"x"])
def test_a_secret_has_its_length(secret: bytes) -> None:
    with pytest.raises(ValueError, match="a secret has 32 bytes"):
        Gate(secret, ONE)
