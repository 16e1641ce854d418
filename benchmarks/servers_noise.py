"""Noise at a server's store: frames, heads and bodies that make no sense, from a seed.

What is framed is refused and the connection goes on; what is not ends the connection it came by. A caller that means
it is served all the while.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import Counter

import msgspec
import torch

from paceline.servers import kv
from paceline.servers.calling import Lines, dial
from paceline.servers.serving import Opening, Refusal, Serving
from paceline.tensors.channel import PREFIX
from paceline.wires import wire

_SECRET = bytes(wire.SECRET_BYTES)
_SAMPLES: list[tuple[msgspec.Struct, bytes]] = [
    (kv.Push("noise", "float32", (4, 4), "assign"), bytes(64)),
    (kv.Push("noise", "float32", (4, 4), "sum", True), bytes(64)),
    (kv.Pull("noise"), b""),
]
_REPLIES = wire.decoder(kv.Replies | Refusal)
_VALUES = [-1, 0, 2**63, None, "", "x" * 300, "\0", [2**62, 4], [-1], [4, 4, 4], b"", {}, True, "max", "int64"]


def _head(dice: random.Random) -> tuple[bytes, bytes]:
    """A head that decodes or nearly does, and a body that may fit it."""
    message, body = dice.choice(_SAMPLES)
    head = bytearray(msgspec.msgpack.encode(message))
    match dice.randrange(4):
        case 0:
            head = bytearray(dice.randbytes(dice.randrange(1, 60)))
        case 1:
            head[dice.randrange(len(head))] = dice.randrange(256)
        case 2:
            fields = msgspec.msgpack.decode(head)
            fields[dice.choice(list(fields))] = dice.choice(_VALUES)
            head = bytearray(msgspec.msgpack.encode(fields))
        case 3:
            body = body[: dice.randrange(len(body) + 1)]
    return bytes(head), body


def _broken(dice: random.Random) -> bytes:
    """Something that is no frame, or ends in the middle of one."""
    head, body = _head(dice)
    frame = PREFIX.pack(len(head), len(body)) + head + body
    match dice.randrange(3):
        case 0:
            return dice.randbytes(dice.randrange(1, 60))
        case 1:
            return frame[: dice.randrange(1, len(frame))]
    return PREFIX.pack(dice.choice([0, 1 << 17, len(head)]), dice.choice([1 << 31, 1 << 40, 1 << 63])) + head


class _Noisy:
    """A connection of one who knows the secret and says anything."""

    def __init__(self, address: str) -> None:
        self.socket = wire.connect(address, _SECRET)
        wire.send(self.socket, Opening("noisy", shared=False))

    def answers(self, frames: list[tuple[bytes, bytes]]) -> list[object]:
        self.socket.sendall(b"".join(PREFIX.pack(len(head), len(body)) + head + body for head, body in frames))
        return [self._answer() for _ in frames]

    def _answer(self) -> object:
        size, nbytes = PREFIX.unpack(self._exactly(PREFIX.size))
        answer = wire.decode(self._exactly(size), _REPLIES)
        self._exactly(nbytes)
        return answer

    def _exactly(self, count: int) -> bytes:
        data = self.socket.recv(count, socket.MSG_WAITALL) if count else b""
        assert len(data) == count, "the server hung up on a proper frame"
        return data

    def break_off(self, words: bytes) -> None:
        self.socket.sendall(words)
        self.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(1 << 16):  # until the server hangs up
                pass
        self.socket.close()


def send_noise(messages: int, seed: int, burst: int = 100) -> str:
    """So many, in bursts of frames that each end with something broken; what came of them, in words."""
    dice, came = random.Random(seed), Counter[str]()
    address = f"paceline-noise-{os.getpid()}"
    serving = Serving([wire.listen(address)], _SECRET, kv.Call, kv.Store().handle)
    lines = Lines([dial(address, _SECRET, "honest")], kv.Replies)
    keys = kv.Keys(lines)
    keys.push("honest", torch.zeros(1000), "assign").result()
    rounds = 0
    while came.total() < messages:
        noisy = _Noisy(address)
        came.update(type(answer).__name__ for answer in noisy.answers([_head(dice) for _ in range(burst - 1)]))
        noisy.break_off(_broken(dice))
        came["connection ended"] += 1
        keys.push("honest", torch.ones(1000)).result()
        rounds += 1
    found = keys.pull("honest").result().tensor
    assert found is not None and found.min() == found.max() == rounds
    lines.close()
    serving.close()
    return f"{came.total()} messages of noise: " + ", ".join(f"{count} {name}" for name, count in came.most_common())
