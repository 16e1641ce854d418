"""The global generators of torch, Python and numpy: seeded together and watched, at little cost. Each is a Mersenne twister.

Python takes 8 µs to fill its own state from a seed, torch and numpy fill theirs with the same numbers in a fifth of that.
So torch's is filled, numpy's gets a copy and Python's gets one that begins half-way: other numbers, as good as any.

A draw moves the place at which a twister reads its state, and where the place comes round to the same one, the state is
another. So a few bytes tell whether anything was drawn, and read where they lie they cost less than a microsecond; asking
for the states costs 80.

A step sees more of this than of anything else that Paceline does on one processor: its model has emptied the caches, and a
call that takes 3 µs by itself takes 30 then (measured).

Only numpy says where its state lies. So the others' are looked for, and what was found is tried before it is used.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any, Protocol

import numpy as np
import torch

_SEED = 0x1B3C5D7F13572468
_WORDS = 624
"""Of a twister's state, 4 bytes each; behind the last one it is made anew."""
_HALF = _WORDS // 2
_END = _WORDS.to_bytes(4, "little")
"""The place of Python's that has just been seeded."""
_PLACE = 20
"""Bytes: the place, and four words of the state beside it."""
_PAIR = 4
"""Bytes: whether numpy has the second of a pair of normal numbers."""

_torch: Any = torch.default_generator
_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_numpy: Any = np.random.mtrand._rand
_bits = _numpy._bit_generator


class Twisters(Protocol):
    def seed(self, seed: int, before: bytes) -> None:
        """All of them; `before` is what `read` gave when that was last done."""

    def name(self, seed: int) -> None:
        """What torch says its seed was, without seeding anything."""

    def read(self) -> bytes:
        """Other bytes after any draw from any of them."""


class Asked:
    """By what each offers; slow."""

    def seed(self, seed: int, before: bytes) -> None:
        _torch.manual_seed(seed)
        _seed_numpy(seed)
        state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state()  # which has none of the script's behind it
        words = state[1].tolist()
        random.setstate((random.getstate()[0], (*words[_HALF:], *words[:_HALF], _WORDS), None))

    def name(self, seed: int) -> None:
        _torch.manual_seed(seed)

    def read(self) -> bytes:
        state: Any = np.random.get_state(legacy=False)
        key = state["state"].pop("key", None)  # of a twister
        rest = repr((random.getstate(), state)).encode()
        return b"".join((_torch.get_state().numpy(), b"" if key is None else key, rest))


class Found:
    """Where they lie. ValueError or AttributeError, if that is elsewhere."""

    def __init__(self) -> None:
        _torch.manual_seed(_SEED)
        torch_at = _torch._cdata + bytes(_memory(_torch._cdata, 256)).index(_SEED.to_bytes(8, "little"))
        python_at, numpy_at = id(_python) + object.__basicsize__, _bits.ctypes.state_address
        self._numpy_places = [_memory(numpy_at + 4 * (_WORDS + 1) - _PLACE, _PLACE), _memory(_found_pair(), _PAIR)]
        self._places = [_memory(torch_at + 8, _PLACE), _memory(python_at, _PLACE), *self._numpy_places]
        self._name, torch_state = _memory(torch_at, 8), _memory(torch_at + 20, 4 * _WORDS)
        self._torch_state, self._numpy_state = torch_state, _memory(numpy_at, 4 * _WORDS)
        self._torch_halves = torch_state[: 4 * _HALF], torch_state[4 * _HALF :]
        self._python_place = _memory(python_at, 4)
        self._python_halves = _memory(python_at + 4, 4 * _HALF), _memory(python_at + 4 + 4 * _HALF, 4 * _HALF)

    def seed(self, seed: int, before: bytes) -> None:
        _torch.manual_seed(seed)
        # numpy's keeps the second of a pair of normal numbers beside its state; but not if nothing was drawn since the last seed.
        if _numpy._bit_generator is _bits and b"".join(self._numpy_places) == before[-_PLACE - _PAIR :]:
            self._numpy_state[:] = self._torch_state
        else:
            _seed_numpy(seed)
        (first, second), mine = self._torch_halves, self._python_halves
        mine[0][:], mine[1][:], self._python_place[:], _python.gauss_next = second, first, _END, None

    def name(self, seed: int) -> None:
        self._name[:] = seed.to_bytes(8, "little")

    def read(self) -> bytes:
        if _numpy._bit_generator is not _bits:  # the script has put another one behind numpy's functions
            return Asked().read()
        return b"".join(self._places if _python.gauss_next is None else (b"pair", *self._places))


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)
    if not isinstance(_numpy._bit_generator, np.random.MT19937):  # of others it leaves the second of a pair
        np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def _found_pair() -> int:
    """Where numpy has whether the second of a pair of normal numbers is there. That number lies behind it."""
    state: Any = np.random.get_state(legacy=False)
    np.random.set_state({**state, "has_gauss": 1, "gauss": float(_SEED)})
    at: int = id(_numpy) + bytes(_memory(id(_numpy), 256)).index(struct.pack("<d", float(_SEED))) - 8
    np.random.set_state({**state, "has_gauss": 0, "gauss": 0.0})
    return at


def _memory(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


def tells_draws(twisters: Twisters) -> bool:
    """Whether it tells, of each generator, one draw and whole rounds of them."""
    for draw in (lambda: torch.rand(()), lambda: random.getrandbits(32), lambda: np.random.bytes(4)):
        seen = [twisters.read()]
        for count in (1, _WORDS - 1, _WORDS):
            for _ in range(count):
                draw()
            seen.append(twisters.read())
        if len(set(seen)) < len(seen) or twisters.read() != seen[-1]:
            return False
    return True


def seeds_alike(twisters: Twisters) -> bool:
    """Whether it seeds as what they offer does, and names a seed that torch tells."""
    for seed in (0, _SEED, (1 << 63) - 1):
        Asked().seed(seed, b"")
        wanted = Asked().read()
        Asked().seed(1, b"")
        twisters.seed(seed, twisters.read())
        if Asked().read() != wanted:
            return False
        twisters.name(3)
        if _torch.initial_seed() != 3 or Asked().read()[8:] != wanted[8:]:  # torch's begins with its seed
            return False
    return True


def find() -> Twisters:
    before = _torch.get_state(), random.getstate(), np.random.get_state()
    try:
        found = Found()
        return found if tells_draws(found) and seeds_alike(found) else Asked()
    except (AttributeError, ValueError):
        return Asked()
    finally:
        _torch.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
