"""The side of benchmarks/flood.py that attacks: python -m benchmarks.flooder ADDRESS MESSAGES PER_S SEED OUT

Strangers, wrong secrets, replays, connections that fall silent, and one with the right secret that then
talks noise. It reads the secret from standard input, for the replays and for the last kind. It takes the
lowest priority and keeps to a pace, for it has no core of its own. What it has sent is in OUT, line by line.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections import Counter, deque
from pathlib import Path

from benchmarks.noise import noise
from paceline.wires import messages, wire
from paceline.wires.handshake import GREETING_BYTES, NONCE_BYTES, Knock

_HELD = 200
"""Connections that it keeps open in silence: more than a door has place for."""
_BATCH = 100
"""Messages that one connection brings."""
_POOL = 400
_REPORT_S = 0.2
_INSIDER_S = 1.0


def _is_message(data: bytes) -> bool:
    try:
        wire.decode(data[4:], messages.ANY)
    except ValueError:
        return False
    return True


class Flooder:
    def __init__(self, address: str, secret: bytes, seed: int) -> None:
        self._address, self._secret, self._dice = address, secret, random.Random(seed)
        # Drawn beforehand: the drawing would cost more than the sending.
        self._batches = [b"".join(noise(self._dice) for _ in range(_BATCH)) for _ in range(_POOL)]
        self._held: deque[socket.socket] = deque()
        self._recorded = b""
        self._kinds = (self._stranger, self._stranger, self._wrong_secret, self._replay, self._silent)
        self.sent: Counter[str] = Counter()

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect("\0" + self._address)
        except BlockingIOError:
            sock.close()
            self.sent["no room"] += 1
            return None
        return sock

    def one(self) -> None:
        """One connection of some kind."""
        sock = self._connect()
        if sock is None:
            return
        kind = self._dice.choice(self._kinds)
        self.sent["connections"] += 1
        self.sent[kind.__name__.strip("_")] += 1
        try:
            kind(sock)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.sent["sent away in the middle"] += 1
        if kind != self._silent:
            sock.close()

    def _stranger(self, sock: socket.socket) -> None:
        sock.send(self._dice.choice(self._batches))
        self.sent["messages"] += _BATCH

    def _wrong_secret(self, sock: socket.socket) -> None:
        greeting = Knock(self._secret, self._dice.randbytes(NONCE_BYTES)).greeting
        sock.send(greeting + self._dice.randbytes(32) + self._dice.choice(self._batches))
        self.sent["messages"] += _BATCH

    def _replay(self, sock: socket.socket) -> None:
        sock.send(self._recorded + self._dice.choice(self._batches))
        self.sent["messages"] += _BATCH

    def _silent(self, sock: socket.socket) -> None:
        greeting = Knock(self._secret, self._dice.randbytes(NONCE_BYTES)).greeting
        sock.send(greeting[: self._dice.randrange(GREETING_BYTES)])
        self._held.append(sock)
        if len(self._held) > _HELD:
            self._held.popleft().close()

    def insider(self) -> None:
        """With the secret: in, and then noise (no message that the run would have to act upon)."""
        knock = Knock(self._secret, self._dice.randbytes(NONCE_BYTES))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect("\0" + self._address)
            sock.settimeout(30)
            sock.sendall(knock.greeting)
            proof = knock.feed(sock.recv(GREETING_BYTES)).reply
            sock.sendall(proof)
            sock.recv(32)
            self._recorded = knock.greeting + proof
            while _is_message(data := noise(self._dice)):
                pass
            sock.sendall(data)
            self.sent["insider"] += 1
            self.sent["messages"] += 1


def main() -> None:
    address, count, per_s, seed, out = sys.argv[1:6]
    os.nice(19)
    flooder = Flooder(address, bytes.fromhex(sys.stdin.readline()), int(seed))
    began = reported = insider_at = time.monotonic()
    flooder.insider()
    done = 0
    while flooder.sent["messages"] < int(count):
        now = time.monotonic()
        if now - insider_at >= _INSIDER_S:
            insider_at = now
            flooder.insider()
        if now - reported >= _REPORT_S:
            reported = now
            Path(out + ".tmp").write_text(json.dumps(flooder.sent))
            os.replace(out + ".tmp", out)
        due = 1 + int((now - began) * float(per_s))
        if due - done > float(per_s):  # it was stopped for a while: no burst after that
            began, done, due = now, 0, 1
        for _ in range(due - done):
            flooder.one()
        done = due
        time.sleep(0.005)
    Path(out).write_text(json.dumps(flooder.sent))


if __name__ == "__main__":
    main()
