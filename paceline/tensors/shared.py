"""Peers on one machine: partial sums meet in shared memory (see `slabs`).

A worker writes its slab, its lanes or its box again only after all have said that they have read the
last ones. The agent's abort word ends every wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, Watch, check_keys
from paceline.tensors.results import Sets
from paceline.tensors.segment import Segment, Words, aligned
from paceline.tensors.slabs import Slabs
from paceline.tensors.tree import Plan

Allocate = Callable[[str, int], int]
"""(name, size) → a descriptor of shared memory, the same for every worker that asks by that name."""

_ARRIVED, _DONE, _KEY = range(3)
_MAILBOX, _LARGEST_BOX = 256 << 10, 64 << 20
_OWN_LANES = 1  # before the caller's: for which points this worker wants a result of its own


class SharedPeers:
    reads_late, ends_together = True, True

    def __init__(self, rank: int, size: int, name: str, allocate: Allocate, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self._name, self._allocate, self._watch = name, allocate, watch
        self._segments = 0
        boxes_at = Words.nbytes(size, 3)
        meet = self._new_segment(boxes_at + size * _MAILBOX)
        self._words = Words(meet, rank, size, 3, watch.check)
        self._boxes = [meet.raw(boxes_at + worker * _MAILBOX, _MAILBOX) for worker in range(size)]
        self._room = _MAILBOX - 8
        self._number = 0
        """Meetings so far."""
        self._lanes: list[NDArray[np.int64]] = []
        self._plan = Plan.of(1, 1)
        self._slabs: Slabs | None = None
        self.sent_bytes = 0
        self._slabs_of: dict[int, Slabs] = {}
        """By layout: a strategy may have several, of which each is met for again and again."""

    @property
    def waited_s(self) -> float:
        return self._words.waited_s

    def _new_memory(self, size: int) -> int:
        self._segments += 1
        return self._allocate(f"{self._name}/memory-{self._segments}", size)

    def _new_segment(self, size: int) -> Segment:
        return Segment(self._new_memory(size), size)

    def _arrive(self, key: int) -> None:
        """Come to meeting `key` and wait until all have; whoever came to another one is named."""
        self._words.write(_KEY, key)
        self._words.say(_ARRIVED, self._number)
        self._words.wait(_ARRIVED, self._number)
        check_keys(self._words.read(_KEY), self.rank, self._watch)

    def _begin(self) -> None:
        """A new meeting: nobody still reads what was written for the last."""
        self._number += 1
        self._words.wait(_DONE, self._number - 1)

    # sums

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        """Memory that all share is grown together when a plan needs more."""
        self._plan = plan
        lanes += _OWN_LANES
        if not self._lanes or lanes > len(self._lanes[0]):
            row = aligned(lanes * 8)
            segment = self._new_segment(self.size * row)
            self._lanes = [segment.words(worker * row, lanes) for worker in range(self.size)]
        known = self._slabs_of.get(id(layout))
        if known is None or not known.fits(plan, layout):
            known = Slabs(self.rank, layout, self._slabs_needed(plan, known), self._new_memory)
            self._slabs_of[id(layout)] = known  # which holds the layout, so that no other one gets its id
        self._slabs = known
        self._begin()

    def _slabs_needed(self, plan: Plan, known: Slabs | None) -> list[int]:
        """For each worker. Who brings nothing needs none; the same layout never gets fewer than it had."""
        needed = [plan.most_parts if plan.parts(worker) else 0 for worker in range(self.size)]
        return needed if known is None else [max(pair) for pair in zip(needed, known.counts, strict=True)]

    def parts(self) -> Parts:
        assert self._slabs is not None
        return self._slabs.parts(self._plan)

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        assert self._slabs is not None
        self._lanes[self.rank][0] = self._slabs.wishes
        self._lanes[self.rank][_OWN_LANES : _OWN_LANES + len(lanes)] = lanes
        self.sent_bytes += lanes.nbytes + len(self._plan.parts(self.rank)) * self._slabs.layout.nbytes
        self._arrive(key)
        return np.stack([row[_OWN_LANES : _OWN_LANES + len(lanes)] for row in self._lanes])

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        return self.sums(call, tuple(range(self.size)), divisor)[0]

    def sums(self, name: int, to: tuple[int, ...], divisor: float) -> Sets:
        """The sum of each root of the plan / divisor, in the results of the workers in `to`."""
        assert self._slabs is not None
        wishes = [int(row[0]) for row in self._lanes]
        results = self._slabs.add(name, self._plan, to, wishes, divisor)
        self._words.say(_DONE, self._number)
        if not self._slabs.little:
            self._slabs.look(name, results)
            self._words.wait(_DONE, self._number)  # until then others write into these results
            results.catch_up()
        return results.mine

    # messages

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        return self._read(key, payload, range(self.size))

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        return b"".join(self._read(key, payload, () if partner is None else (partner,)))

    def _read(self, key: int, payload: bytes, whose: Sequence[int]) -> list[bytes]:
        """Put this payload where others find it, and read those of these workers."""
        got = {worker: bytearray() for worker in whose}
        self.sent_bytes += len(payload)
        sent, longest = 0, 1
        while sent < longest:
            if sent:
                self._grow_boxes(longest)
            room = self._room
            chunk = payload[sent : sent + room]
            self._begin()
            self._boxes[self.rank][:8] = len(payload).to_bytes(8, "little")
            self._boxes[self.rank][8 : 8 + len(chunk)] = chunk
            self._arrive(key)
            for worker, box in enumerate(self._boxes):
                size = int.from_bytes(box[:8], "little")
                longest = max(longest, size)
                if worker in got:
                    got[worker] += box[8 : 8 + max(0, min(room, size - sent))]
            self._words.say(_DONE, self._number)
            sent += room
        return [bytes(part) for part in got.values()]

    def _grow_boxes(self, longest: int) -> None:
        """What did not go through at once shall the next time: each round costs a meeting."""
        size = min(_LARGEST_BOX, aligned(longest + 8))
        if size - 8 > self._room:
            segment = self._new_segment(self.size * size)
            self._boxes = [segment.raw(worker * size, size) for worker in range(self.size)]
            self._room = size - 8

    def close(self) -> None:
        for box in self._boxes:
            box.release()
        self._boxes = []


def supported() -> bool:
    """Plain stores are seen in order on x86-64 only."""
    return os.uname().machine == "x86_64"
