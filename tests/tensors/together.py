"""Peers for tests: several workers as threads of one process.

Strict where real transports differ: what a bucket held when it was posted is what the others get, so a
bucket that changes afterwards and is not sent again gives a wrong sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Parts
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan

CPU = torch.device("cpu")


class Table:
    """Where the members meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.said: list[Any] = [None] * size
        self.sent: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(size)]

    def all_say(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self.barrier.wait()
        everyone = list(self.said)
        self.barrier.wait()
        return everyone


class Member:
    reads_late, ends_together = False, True

    def __init__(self, table: Table, rank: int, device: torch.device = CPU) -> None:
        self.rank, self.size, self.device, self.waited_s = rank, table.size, device, 0.0
        self._table = table
        self.sent_bytes = 0
        self.posted: list[int] = []
        self.reposted: list[int] = []

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._plan, self._layout, self._lanes = plan, layout, lanes
        self._parts = [layout.allocate() for _ in plan.parts(self.rank)]
        self.posted, self.reposted = [], []

    def parts(self) -> Parts:
        return self._parts

    def post(self, bucket: int) -> None:
        assert bucket not in self.posted, "a bucket is posted once; after that it is reposted"
        self.posted.append(bucket)
        self._send(bucket)

    def repost(self, buckets: Sequence[int]) -> None:
        self.reposted += buckets
        for bucket in buckets:
            self._send(bucket)

    def _send(self, bucket: int) -> None:
        at = self._layout.buckets[bucket]
        self._table.sent[self.rank][bucket] = [part[at.flat][at.start : at.stop].clone() for part in self._parts]

    def exchange(self, key: int, lanes: Any) -> Any:
        assert len(lanes) <= self._lanes
        everyone = self._table.all_say(self.rank, (key, lanes))
        assert {other for other, _ in everyone} == {key}
        return np.stack([row for _, row in everyone])

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        assert sorted(self.posted) == list(range(len(self._layout.buckets)))
        self._table.barrier.wait()
        out = self._layout.allocate()
        (root,) = self._plan.roots
        for bucket, at in enumerate(self._layout.buckets):
            sources = [self._table.sent[worker][bucket][part] for worker, part in self._plan.owners]
            TreeSum(sources, root.steps, [out[at.flat][at.start : at.stop]]).add(divisor)
        self._table.barrier.wait()
        return out

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self.sent_bytes += len(payload)
        return self._table.all_say(self.rank, payload)

    def close(self) -> None:
        return


def together(size: int, work: Callable[[Member], Any], device: torch.device = CPU) -> list[Any]:
    """What `work` returned for each of `size` members; the first exception is raised again."""
    table = Table(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Member(table, rank, device))
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
