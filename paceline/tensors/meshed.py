"""Peers over a mesh: the tree over our own connections, proved and encrypted like all others of a run.

Every member owns one segment of each flat. It is sent everybody's partial sums of that segment, straight
from where they lie, adds them in tree order into its result, and the results are swapped, straight to
where they belong. A meeting begins with a note of one size from everybody: whoever came to another meeting
is told so, and no bytes of one meeting can be taken for those of another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.mesh import Mesh
from paceline.tensors.peers import Lanes, Memory, Parts, Watch, check_keys
from paceline.tensors.sums import Scratch, TreeSum
from paceline.tensors.tree import Plan

_NOTE = struct.Struct("<4q")
"""The meeting's number, its key, its kind, and how many bytes this member brings."""
_ROOM = 480
"""Bytes that travel with the note; what is longer follows it."""
_REDUCE, _GATHER = range(2)
_LINE = 16
"""Segments begin at multiples of so many elements: 64 bytes, of fp32."""

Flats = Sequence[torch.Tensor]
_CPU = torch.device("cpu")


class MeshPeers:
    reads_late, ends_together, device = True, False, _CPU

    def __init__(self, mesh: Mesh, watch: Watch) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self._mesh, self._watch = mesh, watch
        self._number = 0
        """Meetings so far."""
        self._plan = Plan.of(1, 1)
        self._layout: Layout | None = None
        self._parts, self._totals = Memory(_CPU), Memory(_CPU)
        self._stages: dict[Plan, list[Parts]] = {}
        self._points: dict[tuple[Plan, int], _Point] = {}

    @property
    def waited_s(self) -> float:
        return self._mesh.waited_s

    @property
    def sent_bytes(self) -> int:
        return self._mesh.sent_bytes

    # sums

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        if layout is not self._layout:
            self._layout, self._stages, self._points = layout, {}, {}
        self._plan = plan
        self._parts.open(layout)
        self._totals.open(layout)

    def parts(self) -> Parts:
        return [self._parts.of(number) for number in range(len(self._plan.parts(self.rank)))]

    def post(self, bucket: int) -> None:
        return  # all leaves when all have met

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        said = b"".join(self._meet(_REDUCE, key, lanes.tobytes()))
        return np.frombuffer(said, dtype=np.int64).reshape(self.size, len(lanes))

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        out = self._totals.of(call)
        self.add_up(call, self.parts(), out, divisor)
        return out

    def add_up(self, name: int, parts: Sequence[Flats], out: Flats, divisor: float) -> None:
        """The total of everybody's parts / divisor. It is fastest where one name means the same memory again."""
        assert self._layout is not None
        if self._plan not in self._stages:
            self._stages[self._plan] = _stage(self.rank, self._plan, self._layout)
        point = self._points.get((self._plan, name))
        if point is None or not point.is_at(parts, out):
            point = _Point(self.rank, self._plan, self._stages[self._plan], parts, out)
            self._points[self._plan, name] = point
        self._mesh.swap(point.scattered, point.staged)
        for tree_sum in point.sums:
            tree_sum.add(divisor)
        self._mesh.swap(point.added, point.gathered)

    # messages

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        return self._meet(_GATHER, key, payload)

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        got = self.scatter(key, [payload if worker == partner else b"" for worker in range(self.size)])
        return b"" if partner is None else got[partner]

    def scatter(self, key: int, payloads: Sequence[bytes]) -> list[bytes]:
        """What each member has for this one, which has these for them."""
        sizes = np.array([len(payload) for payload in payloads], dtype=np.int64)
        table = np.frombuffer(b"".join(self._meet(_GATHER, key, sizes.tobytes())), dtype=np.int64)
        coming = [bytearray(size) for size in table.reshape(self.size, self.size)[:, self.rank].tolist()]
        coming[self.rank][:] = payloads[self.rank]
        self._mesh.swap([[memoryview(payload)] for payload in payloads], [[memoryview(box)] for box in coming])
        return [bytes(box) for box in coming]

    def _meet(self, kind: int, key: int, payload: bytes) -> list[bytes]:
        """Everybody's payload, in the order of ranks."""
        self._number += 1
        note = _NOTE.pack(self._number, key, kind, len(payload)) + payload[:_ROOM].ljust(_ROOM, b"\0")
        heard = [bytearray(note) for _ in range(self.size)]
        self._mesh.swap([[memoryview(note)]] * self.size, [[memoryview(box)] for box in heard])
        notes = [_NOTE.unpack_from(box) for box in heard]
        self._compare(notes)
        got = [box[_NOTE.size : _NOTE.size + note[3]] for box, note in zip(heard, notes, strict=True)]
        rest = [bytearray(max(0, note[3] - _ROOM)) for note in notes]
        if any(rest):
            self._mesh.swap([[memoryview(payload)[_ROOM:]]] * self.size, [[memoryview(more)] for more in rest])
            rest[self.rank][:] = payload[_ROOM:]
        return [bytes(first + more) for first, more in zip(got, rest, strict=True)]

    def _compare(self, notes: Sequence[tuple[int, int, int, int]]) -> None:
        """Lanes must be as many; messages may be of any length."""
        meetings = [(number, key, kind, kind == _REDUCE and length) for number, key, kind, length in notes]
        check_keys([meetings.index(meeting) for meeting in meetings], self.rank, self._watch)

    def close(self) -> None:
        self._mesh.close()


def _stage(rank: int, plan: Plan, layout: Layout) -> list[Parts]:
    """Memory for the others' parts of this member's segments."""
    size = len(plan.ranges)
    mine = [(dtype, segment(count, rank, size)) for dtype, count in layout.flats]
    return [
        [[torch.empty(at.stop - at.start, dtype=dtype) for dtype, at in mine] for _ in plan.parts(worker)]
        if worker != rank
        else []
        for worker in range(size)
    ]


class _Point:
    """The memory of one reduce point, cut up once: for each member what it is sent and where its bytes go."""

    def __init__(self, rank: int, plan: Plan, stage: list[Parts], parts: Sequence[Flats], out: Flats) -> None:
        self._places = _places(parts, out)
        size = len(plan.ranges)
        cut = [[[flat[segment(len(flat), owner, size)] for flat in flats] for owner in range(size)] for flats in parts]
        outs = [[flat[segment(len(flat), owner, size)] for flat in out] for owner in range(size)]
        self.scattered = [_views(flat for part in cut for flat in part[owner]) for owner in range(size)]
        self.staged = [_views(flat for part in of_worker for flat in part) for of_worker in stage]
        self.added = [_views(outs[rank])] * size
        self.gathered = [_views(flats) for flats in outs]
        of_worker = [[part[rank] for part in cut] if worker == rank else stage[worker] for worker in range(size)]
        (root,) = plan.roots
        scratch = Scratch()
        self.sums = [
            TreeSum([of_worker[worker][part][k] for worker, part in plan.owners], root.steps, [flat], scratch)
            for k, flat in enumerate(outs[rank])
        ]

    def is_at(self, parts: Sequence[Flats], out: Flats) -> bool:
        return self._places == _places(parts, out)


def _places(parts: Sequence[Flats], out: Flats) -> list[int]:
    return [flat.data_ptr() for flats in (*parts, out) for flat in flats]


def segment(count: int, owner: int, size: int) -> slice:
    """The owner's stretch of so many elements.

    >>> [segment(100, owner, 3) for owner in range(3)]
    [slice(0, 48, None), slice(48, 96, None), slice(96, 100, None)]
    """
    each = -(-count // (_LINE * size)) * _LINE
    return slice(min(count, owner * each), min(count, (owner + 1) * each))


def _views(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """Their bytes; an empty one has none."""
    return [tensor.numpy().data.cast("B") for tensor in tensors if tensor.numel()]
