"""Peers on one machine: gradients are added where they lie, in shared memory.

Each worker fills its own slab. Once all have arrived, each adds one segment of the slabs in tree order
and writes the sum into every worker's result: each slab is read once, each result written once, and
those are all the bytes that move. (Little is added by everybody for itself: that saves a barrier.)
A result lies in shared memory but belongs to its worker: others write it only while that worker waits
inside a reduce, so what the script does to its gradients in between is its own business.

Words that workers wait on lie on cache lines of their own. The agent's abort word ends every wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, TreeSum, Watch, check_keys, chunks
from paceline.tensors.segment import Segment, aligned, wait_until, wake
from paceline.tensors.tree import Plan

Allocate = Callable[[str, int], int]
"""(name, size) → a descriptor of shared memory, the same for every worker that asks by that name."""

_LINE = 64
_ARRIVED, _DONE, _KEY = range(3)  # one cache line each
_ROW = 3 * _LINE
_MAILBOX = 256 << 10
_LITTLE_BYTES = 256 << 10
"""Up to this, one barrier and a few more bytes read beat two barriers."""


class SharedPeers:
    def __init__(self, rank: int, size: int, name: str, allocate: Allocate, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self.waited_s = 0.0
        self._name, self._allocate, self._watch = name, allocate, watch
        bytes_needed = size * (_ROW + _MAILBOX)
        self._meet = Segment(allocate(f"{name}/meet", bytes_needed), bytes_needed)
        self._number = 0
        self._may_write = True
        words = self._meet.words(0, size * _ROW // 8)
        self._columns = [words[line * _LINE // 8 :: _ROW // 8] for line in range(3)]
        self._boxes = [self._meet.raw(size * _ROW + k * _MAILBOX, _MAILBOX) for k in range(size)]
        self._layout: Layout | None = None
        self._plan = Plan.of(1, 1)
        self._slabs: list[list[list[torch.Tensor]]] = []
        self._results: dict[int, list[list[torch.Tensor]]] = {}
        self._sums: dict[tuple[int, Plan], list[TreeSum]] = {}
        self._lanes: list[NDArray[np.int64]] = []
        self._reserved = (0, 0)
        self._grown = 0

    # words

    def _say(self, column: int) -> None:
        self._columns[column][self.rank] = self._number
        wake(self._meet.address + self.rank * _ROW + column * _LINE)

    def _await(self, column: int, number: int) -> None:
        address = self._meet.address + column * _LINE
        self.waited_s += wait_until(self._columns[column], address, _ROW, number, self._watch.check)

    def _arrive(self, key: int) -> None:
        """Come to meeting `key` and wait until all have; whoever came to another one is named."""
        self._columns[_KEY][self.rank] = key
        self._say(_ARRIVED)
        self._await(_ARRIVED, self._number)
        check_keys(self._columns[_KEY].tolist(), self.rank, self._watch)

    def _before_writing(self) -> None:
        """Nobody still reads what this worker is about to overwrite."""
        if not self._may_write:
            self._await(_DONE, self._number - 1)
            self._may_write = True

    def _begin(self) -> None:
        self._number += 1
        self._may_write = False

    # sums

    def open(self, plan: Plan, layout: Layout, lanes: int) -> Parts:
        self._reserve(plan, layout, lanes)
        self._plan = plan
        self._begin()
        self._before_writing()
        return self._slabs[self.rank][: len(plan.parts(self.rank))]

    def _reserve(self, plan: Plan, layout: Layout, lanes: int) -> None:
        """Slabs for every worker's partial sums; grown together when a plan needs more."""
        parts, known_lanes = max(plan.most_parts, self._reserved[0]), max(lanes, self._reserved[1])
        if layout is self._layout and (parts, known_lanes) == self._reserved:
            return
        if layout is not self._layout:
            self._results = {}
        self._layout, self._reserved, self._sums = layout, (parts, known_lanes), {}
        slab, lane_bytes = aligned(layout.nbytes), aligned(known_lanes * 8)
        segment = self._new_segment(self.size * (parts * slab + lane_bytes))
        at = 0
        self._slabs, self._lanes = [], []
        for _ in range(self.size):
            self._lanes.append(segment.words(at, known_lanes))
            at += lane_bytes
            self._slabs.append([_flats(segment, at + part * slab, layout) for part in range(parts)])
            at += parts * slab

    def _result(self, call: int) -> list[list[torch.Tensor]]:
        """Each worker's flats for the totals of this call."""
        assert self._layout is not None
        if call not in self._results:
            slab = aligned(self._layout.nbytes)
            segment = self._new_segment(self.size * slab)
            self._results[call] = [_flats(segment, worker * slab, self._layout) for worker in range(self.size)]
        return self._results[call]

    def _new_segment(self, size: int) -> Segment:
        self._grown += 1
        return Segment(self._allocate(f"{self._name}/memory-{self._grown}", size), size)

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        self._lanes[self.rank][: len(lanes)] = lanes
        self._arrive(key)
        return np.stack([row[: len(lanes)] for row in self._lanes])

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        assert self._layout is not None
        results = self._result(call)
        if (call, self._plan) not in self._sums:
            self._sums[call, self._plan] = self._sum_into(results)
        for tree_sum in self._sums[call, self._plan]:
            tree_sum.add(divisor)
        self._say(_DONE)
        if not self._little:
            self._await(_DONE, self._number)
            self._may_write = True
        return results[self.rank]

    @property
    def _little(self) -> bool:
        return self._layout is not None and self._layout.nbytes <= _LITTLE_BYTES

    def _sum_into(self, results: list[list[torch.Tensor]]) -> list[TreeSum]:
        """This worker's part of the work, the last chunks first: what was written last is still cached."""
        assert self._layout is not None
        (root,) = self._plan.roots
        sums = []
        for index, (_, count) in reversed(list(enumerate(self._layout.flats))):
            sources = [self._slabs[worker][part][index] for worker, part in self._plan.owners]
            if self._little:
                sums.append(TreeSum(sources, root.steps, [results[self.rank][index]]))
            else:
                windows = chunks(count)[self.rank :: self.size][::-1]
                sums.append(TreeSum(sources, root.steps, [result[index] for result in results], windows))
        return sums

    # messages

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        got: list[bytearray] = [bytearray() for _ in range(self.size)]
        sent, longest = 0, 1
        while sent < longest:
            chunk = payload[sent : sent + _MAILBOX - 8]
            self._begin()
            self._before_writing()
            box = self._boxes[self.rank]
            box[:8] = len(payload).to_bytes(8, "little")
            box[8 : 8 + len(chunk)] = chunk
            self._arrive(key)
            for worker, other in enumerate(self._boxes):
                size = int.from_bytes(other[:8], "little")
                longest = max(longest, size)
                got[worker] += other[8 : 8 + max(0, min(_MAILBOX - 8, size - sent))]
            self._say(_DONE)
            sent += _MAILBOX - 8
        return [bytes(part) for part in got]

    def close(self) -> None:
        for box in self._boxes:
            box.release()
        self._boxes = []


def _flats(segment: Segment, offset: int, layout: Layout) -> list[torch.Tensor]:
    flats = []
    for dtype, count in layout.flats:
        flats.append(segment.tensor(offset, count, dtype))
        offset += count * dtype.itemsize
    return flats


def supported() -> bool:
    """Plain stores are seen in order on x86-64 only."""
    return os.uname().machine == "x86_64"
