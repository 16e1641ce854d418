"""Peers on several machines: shared memory inside each, a mesh between their leaders.

The workers of a machine carry few whole subtrees of the one tree between them, which they can add up by
themselves. A machine's first worker takes these sums to the other machines, as if the machine were one
worker with all its slots, and brings the total back. The order of additions is that of the tree wherever
the machines' borders lie.

A worker that waits for its leader, who waits for another machine, would never hear of a death there: it
waits for one who is alive. So in such a group any member's death ends every wait. Whoever has all that a
meeting needs completes it, and may then be one meeting ahead of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.mesh import Lines, meet
from paceline.tensors.meshed import MeshPeers
from paceline.tensors.peers import Lanes, Parts, Peers, Watch, check_keys
from paceline.tensors.shared import Allocate, SharedPeers
from paceline.tensors.tree import Plan

_SUMS, _LEADER = -1, 0
"""The name of the memory for a machine's sums; the worker of a machine that speaks for it."""


class Anyone:
    """A watch for some members of a group, which ends a wait for them if anybody of the whole group is gone."""

    def __init__(self, watch: Watch, members: Sequence[int], others: Sequence[int]) -> None:
        self._watch, self._members, self._others = watch, members, others

    def check(self, seconds: float, laggard: int) -> None:
        for other in self._others:
            self._watch.check(0.0, other)
        self._watch.check(seconds, self._members[laggard])

    def mismatch(self, others: list[int]) -> NoReturn:
        self._watch.mismatch([self._members[other] for other in others])


def build(rank: int, sizes: Sequence[int], name: str, allocate: Allocate, lines: Lines, watch: Watch) -> Peers:
    """The group of this name. `sizes`: how many workers each machine has, in the order of ranks;
    `lines`: to the first worker of each; `allocate`: memory that the workers of this machine share."""
    firsts = [sum(sizes[:machine]) for machine in range(len(sizes))]
    machine = max(k for k, first in enumerate(firsts) if first <= rank)
    others = [worker for worker in range(sum(sizes)) if worker != rank]
    if len(sizes) == 1:
        return SharedPeers(rank, sizes[0], name, allocate, watch)
    between = Anyone(watch, firsts, others)
    if max(sizes) == 1:
        return MeshPeers(meet(name, machine, lines, between), between)
    near = Anyone(watch, range(firsts[machine], firsts[machine] + sizes[machine]), others)
    inside, outward = (
        SharedPeers(rank - firsts[machine], sizes[machine], f"{name}/machine-{machine}/{way}", allocate, near)
        for way in ("in", "out")
    )
    across = MeshPeers(meet(name, machine, lines, between), between) if inside.rank == _LEADER else None
    return MachinePeers(machine, tuple(sizes), inside, outward, across, watch)


class MachinePeers:
    """`inside` adds up what this machine's workers bring, `across` what the machines bring, and `outward`
    hands the total to the workers. The parts stay as they are until all is done: they may be needed again.
    """

    reads_late, ends_together = True, False

    def __init__(
        self,
        machine: int,
        sizes: tuple[int, ...],
        inside: SharedPeers,
        outward: SharedPeers,
        across: MeshPeers | None,
        watch: Watch,
    ) -> None:
        self._first = sum(sizes[:machine])
        self.rank, self.size, self.device = self._first + inside.rank, sum(sizes), inside.device
        self._sizes, self._inside, self._outward, self._across = sizes, inside, outward, across
        self._watch = watch
        self._plans: dict[Plan, tuple[Plan, Plan]] = {}
        self._layout: Layout | None = None
        self._sums: Parts = []
        # The total is handed out as a sum of one part: the leader's.
        self._from_leader = Plan(1, (((0, 1),), *(((1, 1),) for _ in range(inside.size - 1))))

    @property
    def waited_s(self) -> float:
        return self._inside.waited_s + self._outward.waited_s + (self._across.waited_s if self._across else 0.0)

    @property
    def sent_bytes(self) -> int:
        return self._across.sent_bytes if self._across else 0

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        if plan not in self._plans:
            last = self._first + self._inside.size
            self._plans[plan] = plan.among(self._first, last), plan.by_machine(self._sizes)
        here, between = self._plans[plan]
        self._layout = layout
        self._inside.open(here, layout, lanes)
        if self._across is not None:
            self._across.open(between, layout, lanes)

    def parts(self) -> Parts:
        return self._inside.parts()

    def post(self, bucket: int) -> None:
        return  # a machine's sums leave when all its workers have met

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        rows = self._inside.exchange(key, lanes)
        self._sums = self._inside.sums(_SUMS, (_LEADER,), 1.0)
        everyone = b"".join(self._between(key, rows.tobytes()))
        return np.frombuffer(everyone, dtype=np.int64).reshape(self.size, len(lanes))

    def _between(self, key: int, payload: bytes) -> list[bytes]:
        """Every machine's payload, by way of the leaders, who must all have come to the same meeting."""
        packed = b""
        if self._across is not None:
            said = self._across.gather(0, key.to_bytes(8, "little", signed=True) + payload)
            packed = _pack(said)
        said = _unpack(self._inside.gather(key, packed)[_LEADER])
        keys = [int.from_bytes(part[:8], "little", signed=True) for part in said]
        of_workers = [key for key, size in zip(keys, self._sizes, strict=True) for _ in range(size)]
        check_keys(of_workers, self.rank, self._watch)
        return [part[8:] for part in said]

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        assert self._layout is not None
        self._outward.open(self._from_leader, self._layout, 0)
        if self._across is not None:
            self._across.add_up(call, self._sums, self._outward.parts()[0], divisor)
        self._outward.exchange(call, np.empty(0, dtype=np.int64))
        return self._outward.total(call, 1.0)

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        said = self._inside.gather(key, payload)
        return [part for machine in self._between(key, _pack(said)) for part in _unpack(machine)]

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        """By way of the leaders: what a machine sends to another one is for the workers there alone."""
        here = range(self._first, self._first + self._inside.size)
        said = self._inside.gather(key, _addressed(-1 if partner is None else partner, payload))
        packed = b""
        if self._across is not None:
            out: list[list[bytes]] = [[] for _ in self._sizes]
            ends = list(accumulate(self._sizes))
            for letter in said:
                if (to := _address(letter)) >= 0 and to not in here:
                    out[bisect_right(ends, to)].append(letter)
            packed = b"".join(self._across.scatter(key, [_pack(letters) for letters in out]))
        came = _unpack(self._inside.gather(key, packed)[_LEADER])
        if partner is None:
            return b""
        if partner in here:
            return said[partner - self._first][8:]
        return next(letter[8:] for letter in came if _address(letter) == self.rank)

    def close(self) -> None:
        self._inside.close()
        self._outward.close()
        if self._across is not None:
            self._across.close()


def _addressed(to: int, payload: bytes) -> bytes:
    return to.to_bytes(8, "little", signed=True) + payload


def _address(letter: bytes) -> int:
    return int.from_bytes(letter[:8], "little", signed=True)


def _pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _unpack(packed: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(packed):
        size = int.from_bytes(packed[at : at + 8], "little")
        parts.append(packed[at + 8 : at + 8 + size])
        at += 8 + size
    return parts
