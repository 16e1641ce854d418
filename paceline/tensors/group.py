"""Peers over a process group of torch: Gloo between processes or machines, NCCL between GPUs.

The same tree, over messages: every worker owns one segment of each bucket. It is sent everybody's
partial sums of that segment, adds them in tree order, and the results are gathered. A worker with
one whole subtree moves as many bytes as in a ring; uneven deals send a few partial sums more.

A bucket's first leg leaves when it is posted, while backward still runs.

A worker's death breaks connections of some members and leaves others waiting; either way a wait ends when the watch
knows of the view that follows. Torch's own groups are then left as they are: destroying one whose members have not met can
abort the process, or wait for what will never come (measured). They cost a few threads and sockets a term. NCCL's
are aborted, which ends its kernels and frees its memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import PeerLostError
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Memory, Parts, TermEnded, Watch, check_keys
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan

_TIMEOUT = timedelta(minutes=30)
_EXPLAINED_S = 30.0
"""A broken connection is somebody's death, which the leader tells; if the leader is gone too, its standby does."""
_left: list[Any] = []
"""Groups of torch that this process has been in, and that nobody has met at the end of."""


def gloo(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)


def nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else torch ends the process when a member is lost
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    _left.append(group)  # before it is connected: then it can be aborted while it waits for one who is gone
    group.eager_connect_single_device(device)
    return group


def abandon_all() -> None:
    """This worker goes into another term: what NCCL still computes for those before is in vain, and its memory is wanted."""
    for group in _left:
        if not isinstance(group, dist.ProcessGroupGloo):
            group.abort()


def built(make: Callable[[], Any], watch: Watch, laggard: int) -> Any:
    """What `make` makes, in a thread of its own: torch waits in there for members, and one may be gone."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001  told where it is waited for, if it still is
            made.set_exception(error)

    threading.Thread(target=run, name="paceline-group", daemon=True).start()
    start = time.perf_counter()
    while not made.done():
        watch.check(time.perf_counter() - start, laggard)
        time.sleep(0.0005)
    try:
        return made.result()
    except RuntimeError as error:
        explain(error, watch, laggard)


def explain(error: RuntimeError, watch: Watch, laggard: int) -> NoReturn:
    """A connection is gone, so somebody is: wait until it is known who."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < _EXPLAINED_S:
        watch.check(waited, laggard)
        time.sleep(0.0005)
    raise PeerLostError(f"a connection to another worker broke, and no worker is gone: {error}") from None


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
        _left.extend(group for group in (data, control) if group not in _left)

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
        sizes = [count * segment for count in counts], [mine * segment] * self.size
        try:
            work = self._data.alltoall_base(incoming, outgoing.view(-1), *sizes, dist.AllToAllOptions())
        except RuntimeError as error:
            explain(error, self._watch, self._next)
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
        try:
            work = self._control.alltoall_base(theirs, mine, coming, out, dist.AllToAllOptions())
        except RuntimeError as error:
            explain(error, self._watch, self._next)
        self._wait(work)
        self.sent_bytes += mine.nbytes
        return theirs.numpy().tobytes()

    @property
    def _next(self) -> int:
        """Whom to name while it is not known who is late."""
        return (self.rank + 1) % self.size

    def _wait(self, work: Any) -> None:
        start = time.perf_counter()
        try:
            while not work.is_completed():
                self._watch.check(time.perf_counter() - start, self._next)
                time.sleep(0.0001)
            work.wait()
        except RuntimeError as error:
            explain(error, self._watch, self._next)
        finally:
            self.waited_s += time.perf_counter() - start

    def close(self) -> None:
        try:
            self._wait(self._control.barrier())
        except (TermEnded, PeerLostError):
            return
        _left.remove(self._data)
        _left.remove(self._control)
