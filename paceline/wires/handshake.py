"""How two processes of a run prove to each other that they know its secret, which itself never travels.

    the one who knocks                  the gate
    magic, version, nonce      ──▶
                               ◀──      magic, version, nonce
    HMAC("knock", both nonces) ──▶
                               ◀──      HMAC("gate", both nonces)

The gate proves itself last, so a stranger gets 40 bytes without meaning out of it, or nothing at all.
Both nonces are fresh: a recorded handshake opens nothing a second time. The two proofs are made under
different labels: one side's proof sent back to it is wrong. `binding` says over which channel they talk
(the certificate, under TLS): whoever sits between the two has another one, and the proofs differ.

Pure: bytes in, bytes and a verdict out; who calls has the socket and the clock. No torch in here.
"""

from __future__ import annotations

import enum
import hmac
from abc import ABC, abstractmethod
from typing import NamedTuple

SECRET_BYTES = 32
NONCE_BYTES = 32
_PROOF_BYTES = 32
_VERSION = 1
_MAGIC = b"PACELN\n" + bytes([_VERSION])
GREETING_BYTES = len(_MAGIC) + NONCE_BYTES


class Verdict(enum.Enum):
    OPEN = "more is to come"
    ADMITTED = "both sides have proved themselves"
    REFUSED = "close it without a word"


class Move(NamedTuple):
    """What to do now: send the reply, and act by the verdict."""

    verdict: Verdict
    reply: bytes = b""
    why: str = ""
    """Of a refusal, for the log."""


class _Side(ABC):
    """What both sides do: wait for a greeting, then for a proof."""

    _ours: bytes
    _theirs: bytes

    def __init__(self, secret: bytes, nonce: bytes, binding: bytes = b"") -> None:
        if len(secret) != SECRET_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes and a nonce {NONCE_BYTES}")
        self._secret, self._nonce, self._binding = secret, nonce, binding
        self._peer_nonce = b""
        self._heard = b""
        self._over = False

    @property
    def greeting(self) -> bytes:
        return _MAGIC + self._nonce

    @property
    def wanted(self) -> int:
        """How many more bytes the next move needs. Read no more than these: the rest are messages."""
        return (_PROOF_BYTES if self._peer_nonce else GREETING_BYTES) - len(self._heard)

    def feed(self, data: bytes) -> Move:
        """Take what came from the other side."""
        if self._over or len(data) > self.wanted:
            return self._refuse("it said more than a handshake")
        self._heard += data
        return self._on_proof() if self._peer_nonce else self._on_greeting()

    def _on_greeting(self) -> Move:
        name = _MAGIC[:-1]
        if not name.startswith(self._heard[: len(name)]):
            return self._refuse("it does not speak Paceline")
        version = self._heard[len(name) : len(_MAGIC)]
        if version and version[0] != _VERSION:
            return self._refuse(f"it speaks version {version[0]} of the handshake, this run {_VERSION}")
        if self.wanted:
            return Move(Verdict.OPEN)
        self._peer_nonce, self._heard = self._heard[len(_MAGIC) :], b""
        return Move(Verdict.OPEN, self._greeted())

    def _on_proof(self) -> Move:
        if self.wanted:
            return Move(Verdict.OPEN)
        if not hmac.compare_digest(self._heard, self._proof(self._theirs)):
            return self._refuse("it does not know the run's secret")
        self._over = True
        return Move(Verdict.ADMITTED, self._believed())

    def _refuse(self, why: str) -> Move:
        self._over = True
        return Move(Verdict.REFUSED, why=why)

    def _proof(self, label: bytes) -> bytes:
        """Every part has a fixed length or stands last, so no two transcripts read alike."""
        knock, gate = self._nonces()
        return hmac.digest(self._secret, _MAGIC + label + knock + gate + self._binding, "sha256")

    @abstractmethod
    def _nonces(self) -> tuple[bytes, bytes]:
        """Of the one who knocks, and of the gate."""

    @abstractmethod
    def _greeted(self) -> bytes:
        """The answer to a greeting."""

    @abstractmethod
    def _believed(self) -> bytes:
        """The answer to a proof that holds."""


_KNOCK, _GATE = b"knock", b"gate-"


class Gate(_Side):
    """The side that admits."""

    _ours, _theirs = _GATE, _KNOCK

    def _nonces(self) -> tuple[bytes, bytes]:
        return self._peer_nonce, self._nonce

    def _greeted(self) -> bytes:
        return self.greeting

    def _believed(self) -> bytes:
        return self._proof(self._ours)


class Knock(_Side):
    """The side that asks to be let in; it sends its `greeting` first."""

    _ours, _theirs = _KNOCK, _GATE

    def _nonces(self) -> tuple[bytes, bytes]:
        return self._nonce, self._peer_nonce

    def _greeted(self) -> bytes:
        return self._proof(self._ours)

    def _believed(self) -> bytes:
        return b""
