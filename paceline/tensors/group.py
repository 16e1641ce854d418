"""Peers over a process group of torch: Gloo between processes or machines, NCCL between GPUs.

The same tree, over messages: every worker owns one segment of each bucket. It is sent everybody's
partial sums of that segment, adds them in tree order, and the results are gathered. A worker with
one whole subtree moves as many bytes as in a ring; uneven deals send a few partial sums more.

A bucket's first leg leaves when it is posted, while backward still runs. A group is abandoned by
dropping it: destroying one without a barrier can abort the process (measured), so `close` meets first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import PeerLostError
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Memory, Parts, Watch, check_keys
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan

_TIMEOUT = timedelta(minutes=30)


def gloo(store: Any, rank: int, size: int) -> Any:
    try:
        return dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)
    except RuntimeError as error:
        raise PeerLostError(f"a worker went away while the group was built: {error}") from None


def nccl(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


class GroupPeers:
    """`data` moves the sums; `control` (Gloo) moves lanes and messages."""

    reads_late, ends_together = False, False

    def __init__(self, rank: int, size: int, data: Any, control: Any, watch: Watch, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.waited_s, self.sent_bytes = 0.0, 0
        self._data, self._control, self._watch = data, control, watch
        self._layout: Layout | None = None
        self._plan = Plan.of(1, 1)
        self._sent: dict[int, tuple[Any, torch.Tensor]] = {}
        self._parts, self._totals = Memory(device), Memory(device)

    # sums

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._plan, self._layout, self._sent = plan, layout, {}
        self._parts.open(layout)
        self._totals.open(layout)

    def parts(self) -> Parts:
        return [self._parts.of(number) for number in range(len(self._plan.parts(self.rank)))]

    def _segment(self, bucket: int) -> int:
        """Elements of each worker's segment of this bucket, padded so that all are equal."""
        assert self._layout is not None
        at = self._layout.buckets[bucket]
        return -(-(at.stop - at.start) // (16 * self.size)) * 16

    def post(self, bucket: int) -> None:
        assert self._layout is not None
        at, segment = self._layout.buckets[bucket], self._segment(bucket)
        size, padded = at.stop - at.start, segment * self.size
        counts = [len(self._plan.parts(worker)) for worker in range(self.size)]
        mine = counts[self.rank]
        dtype = self._layout.flats[at.flat][0]
        # Laid out by destination: for each owner, this worker's partial sums of the owner's segment.
        outgoing = torch.zeros(self.size, mine, segment, dtype=dtype, device=self.device)
        for number, part in enumerate(self.parts()):
            row = torch.zeros(padded, dtype=dtype, device=self.device)
            row[:size] = part[at.flat][at.start : at.stop]
            outgoing[:, number] = row.view(self.size, segment)
        self.sent_bytes += outgoing[0].nbytes * (self.size - 1)
        incoming = torch.empty(sum(counts) * segment, dtype=dtype, device=self.device)
        work = self._data.alltoall_base(
            incoming,
            outgoing.view(-1),
            [count * segment for count in counts],
            [mine * segment] * self.size,
            dist.AllToAllOptions(),
        )
        self._sent[bucket] = (work, incoming)

    def repost(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            if bucket in self._sent:
                self._wait(self._sent.pop(bucket)[0])
            self.post(bucket)

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        # Rows of one width: a worker that came to another meeting must not crash Gloo (it aborts the process).
        width = len(lanes)
        lanes = np.concatenate([lanes, np.zeros(max(0, 64 - width), dtype=np.int64)])
        row = torch.from_numpy(np.concatenate([[key], lanes]))
        rows = torch.empty(self.size, len(row), dtype=torch.int64)
        self._wait(self._control._allgather_base(rows.view(-1), row))
        self.sent_bytes += row.nbytes * (self.size - 1)
        check_keys(rows[:, 0].tolist(), self.rank, self._watch)
        table: NDArray[np.int64] = rows[:, 1 : 1 + width].numpy()
        return table

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        assert self._layout is not None
        out = self._totals.of(call)
        (root,) = self._plan.roots
        gathers = []
        for bucket, at in enumerate(self._layout.buckets):
            work, incoming = self._sent.pop(bucket)
            self._wait(work)
            segment = self._segment(bucket)
            mine = torch.empty(segment, dtype=incoming.dtype, device=self.device)
            TreeSum(list(incoming.view(len(self._plan.cover), segment)), root.steps, [mine]).add(divisor)
            whole = torch.empty(segment * self.size, dtype=incoming.dtype, device=self.device)
            self.sent_bytes += mine.nbytes * (self.size - 1)
            gathers.append((self._data._allgather_base(whole, mine), whole, mine, at))
        for work, whole, _, at in gathers:
            self._wait(work)
            out[at.flat][at.start : at.stop] = whole[: at.stop - at.start]
        return out

    # messages

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        sizes = self.exchange(key, np.array([len(payload)], dtype=np.int64))[:, 0].tolist()
        longest = max(1, *sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = torch.empty(self.size, longest, dtype=torch.uint8)
        self._wait(self._control._allgather_base(everyone.view(-1), mine))
        self.sent_bytes += mine.nbytes * (self.size - 1)
        return [everyone[k, :size].numpy().tobytes() for k, size in enumerate(sizes)]

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        # Not by send and recv: whether these are done cannot be asked, and a wait for them hears of no death.
        sizes = self.exchange(key, np.array([len(payload)], dtype=np.int64))[:, 0].tolist()
        out = [len(payload) if worker == partner else 0 for worker in range(self.size)]
        coming = [size if worker == partner else 0 for worker, size in enumerate(sizes)]
        mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: sum(out)]
        theirs = torch.empty(sum(coming), dtype=torch.uint8)
        self._wait(self._control.alltoall_base(theirs, mine, coming, out, dist.AllToAllOptions()))
        self.sent_bytes += mine.nbytes
        return theirs.numpy().tobytes()

    def _wait(self, work: Any) -> None:
        start = time.perf_counter()
        try:
            while not work.is_completed():
                self._watch.check(time.perf_counter() - start, (self.rank + 1) % self.size)
                time.sleep(0.0001)
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a worker went away in the middle of a collective: {error}") from None
        finally:
            self.waited_s += time.perf_counter() - start

    def close(self) -> None:
        try:
            self._control.barrier().wait()
        except RuntimeError:
            return
