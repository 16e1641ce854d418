"""Peers on several machines: shared memory inside each, a process group between their leaders.

The workers of a machine carry neighbouring slots, so what they can add up by themselves are whole
subtrees of the one tree. A machine's first worker takes these sums to the other machines, as if the
machine were one worker with all its slots, and brings the total back. The order of additions is that of
the tree wherever the machines' borders lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.group import GroupPeers
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, Watch, check_keys
from paceline.tensors.shared import SharedPeers
from paceline.tensors.tree import Plan

_SUMS, _LEADER = -1, 0
"""The name of the memory for a machine's sums; the worker of a machine that speaks for it."""


class Renamed:
    """A watch for one of the two groups, which knows the whole run's numbers of its members."""

    def __init__(self, watch: Watch, workers: Sequence[int]) -> None:
        self._watch, self._workers = watch, workers

    def check(self, seconds: float, laggard: int) -> None:
        self._watch.check(seconds, self._workers[laggard])

    def mismatch(self, others: list[int]) -> NoReturn:
        self._watch.mismatch([self._workers[other] for other in others])


def watches(watch: Watch, machine: int, sizes: tuple[int, ...]) -> tuple[Renamed, Renamed]:
    """One for the workers of this machine, one for the leaders."""
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    return Renamed(watch, range(firsts[machine], firsts[machine] + sizes[machine])), Renamed(watch, firsts)


class MachinePeers:
    """`sizes`: how many workers each machine has; `local`: this machine's; `across`: the leaders', for a leader."""

    reads_late, ends_together = True, False

    def __init__(
        self, machine: int, sizes: tuple[int, ...], local: SharedPeers, across: GroupPeers | None, watch: Watch
    ) -> None:
        assert (across is not None) == (local.rank == _LEADER)
        self._first = sum(sizes[:machine])
        self.rank, self.size, self.device = self._first + local.rank, sum(sizes), local.device
        self._sizes, self._local, self._across, self._watch = sizes, local, across, watch
        self._plans: dict[Plan, tuple[Plan, Plan]] = {}
        self._layout: Layout | None = None
        # The total is handed out as a sum of one part: the leader's.
        self._from_leader = Plan(1, (((0, 1),), *(((1, 1),) for _ in range(local.size - 1))))

    @property
    def waited_s(self) -> float:
        return self._local.waited_s + (self._across.waited_s if self._across else 0.0)

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        if plan not in self._plans:
            last = self._first + self._local.size
            self._plans[plan] = plan.among(self._first, last), plan.by_machine(self._sizes)
        inside, between = self._plans[plan]
        self._layout = layout
        self._local.open(inside, layout, lanes)
        if self._across is not None:
            self._across.open(between, layout, lanes)

    def parts(self) -> Parts:
        return self._local.parts()

    def post(self, bucket: int) -> None:
        return  # a machine's sums leave when all its workers have met

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        rows = self._local.exchange(key, lanes)
        sums = self._local.sums(_SUMS, (_LEADER,), 1.0)
        if self._across is not None:
            self._send(sums)
        everyone = b"".join(self._between(key, rows.tobytes()))
        return np.frombuffer(everyone, dtype=np.int64).reshape(self.size, len(lanes))

    def _send(self, sums: Parts) -> None:
        assert self._across is not None and self._layout is not None
        for part, flats in zip(self._across.parts(), sums, strict=True):
            for target, value in zip(part, flats, strict=True):
                target.copy_(value)
        for bucket in range(len(self._layout.buckets)):
            self._across.post(bucket)

    def _between(self, key: int, payload: bytes) -> list[bytes]:
        """Every machine's payload, by way of the leaders, who must all have come to the same meeting."""
        packed = b""
        if self._across is not None:
            said = self._across.gather(0, key.to_bytes(8, "little", signed=True) + payload)
            packed = _pack(said)
        said = _unpack(self._local.gather(key, packed)[_LEADER])
        keys = [int.from_bytes(part[:8], "little", signed=True) for part in said]
        of_workers = [key for key, size in zip(keys, self._sizes, strict=True) for _ in range(size)]
        check_keys(of_workers, self.rank, self._watch)
        return [part[8:] for part in said]

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        assert self._layout is not None
        self._local.open(self._from_leader, self._layout, 0)
        if self._across is not None:
            for target, value in zip(self._local.parts()[0], self._across.total(call, divisor), strict=True):
                target.copy_(value)
        self._local.exchange(call, np.empty(0, dtype=np.int64))
        return self._local.total(call, 1.0)

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        said = self._local.gather(key, payload)
        return [part for machine in self._between(key, _pack(said)) for part in _unpack(machine)]

    def close(self) -> None:
        self._local.close()
        if self._across is not None:
            self._across.close()


def _pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _unpack(packed: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(packed):
        size = int.from_bytes(packed[at : at + 8], "little")
        parts.append(packed[at + 8 : at + 8 + size])
        at += 8 + size
    return parts
