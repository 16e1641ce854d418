"""A reduce point whose gradients travel coded.

A codec acts on each share by itself: what is added up, in the order of the tree, is what each share's message
decodes to. So the result does not depend on who carries which share, and every worker, which hears all messages, comes to the
same bits. Where sums of messages mean something, a worker adds up the messages of its shares first.

Buffers, and parameters in double precision, travel as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import torch

from paceline.tensors.codecs.base import Codec
from paceline.tensors.codecs.kept import Allocate, Kept
from paceline.tensors.encoding import Encoder, Message, seed_of
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan, Range, split

_ALIGN = 8


class CodedReducer(Reducer):
    """As a `Reducer`, except that nothing leaves before its share is done. `begin` comes before each `open`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        count: int,
        peers: Peers,
        codec: Codec,
        allocate: Allocate | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`layout`: of all tensors, where those that travel as ever lie among the others."""
        self._codec, self.encoder = codec, Encoder(tensors, count, codec)
        coded = set(self.encoder.coded)
        self._plain = [index for index in range(len(tensors)) if index not in coded]
        own = layout.only(self._plain) if layout is not None else None
        super().__init__([tensors[index] for index in self._plain], len(self._plain), peers, own)
        self._device = self.encoder.device
        self._mask_bytes = _aligned(-(-len(coded) // 8))
        self._size = self.encoder.size
        self.kept = Kept(codec, self.encoder.shapes, allocate)
        self._messages: dict[int, Message] = {}
        """Of each share that this worker has folded."""
        self._sums = _Levels(self.encoder.elements, self._device)
        self._message_sums = _Levels(self._size // 4, torch.device("cpu"))
        self._totals_of: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self.sent_bytes = self.plain_bytes = 0
        """What the messages came to, and what the same would have been in fp32."""

    def go_on_from(self, older: CodedReducer) -> None:
        """Take the place of another one. What it kept of other tensors is of no use."""
        self.sent_bytes, self.plain_bytes = older.sent_bytes, older.plain_bytes
        if self.encoder.shapes == older.encoder.shapes:
            self.kept = older.kept

    # nothing leaves early

    @property
    def on_last_leaf(self) -> bool:
        return False

    def waits(self, learned: Sequence[int]) -> list[int]:
        return []

    # folding

    def begin(self, step: int, call: int) -> None:
        self._seed, self._call = seed_of(step, call), call

    def open(self, plan: Plan, lanes: int) -> None:
        super().open(plan, lanes)
        self.kept.open(self._call, plan.leaves)
        self._messages = {}

    def carry_on(self, plan: Plan, peers: Peers, lanes: int, kept: int) -> list[int]:
        due = super().carry_on(plan, peers, lanes, kept)
        mine = set(plan.leaves_of(peers.rank)) - set(due)
        self._messages = {leaf: message for leaf, message in self._messages.items() if leaf in mine}
        return due

    def fold(self, leaf: int, grads: Sequence[torch.Tensor | None], weight: float) -> None:
        super().fold(leaf, [grads[index] for index in self._plain], weight)
        self._messages[leaf] = self._encode(leaf, grads, weight)

    def missed(self, leaf: int, leaves: int, grads: Sequence[torch.Tensor | None], weight: float) -> None:
        """The others have met for this share already: what its message left out is kept, as if this one had met them."""
        self.kept.open(self._call, leaves)
        self._encode(leaf, grads, weight)
        self.kept.commit([leaf])

    def _encode(self, leaf: int, grads: Sequence[torch.Tensor | None], weight: float) -> Message:
        return self.encoder.encode(grads, weight, self._seed, self.kept.old(leaf), self.kept.new(leaf))

    # meeting

    def commit(self, key: int, call: int, lanes: Sequence[int], mean: bool, scale: float) -> Outcome:
        outcome = super().commit(key, call, lanes, mean, scale)
        payload = b"".join(self._packed(message) for _, message in self._leaving())
        heard = self._unpacked(self.peers.gather(key, payload))
        self._met(len(payload))
        total, views = self._total_of(call)
        TreeSum([self._added(heard)], (), [total]).add(outcome.divisor)
        mask = reduce(or_, (message.mask for message in heard.values()))
        return self._merged(outcome, views, mask)

    def _met(self, sent_bytes: int) -> None:
        """All have: what is kept from now on is what these messages have left out."""
        self.kept.commit(list(self._messages))
        self.sent_bytes += sent_bytes
        self.plain_bytes += 4 * self.encoder.elements * len(self._plan.parts(self.peers.rank))

    def _nodes(self, worker: int) -> list[Range]:
        """What this worker sends messages of."""
        parts = self._plan.parts(worker)
        return parts if self._codec.summable else [(leaf, leaf + 1) for part in parts for leaf in range(*part)]

    def _leaving(self) -> list[tuple[Range, Message]]:
        """This worker's messages, and what they are of."""
        leaving = []
        for node in self._nodes(self.peers.rank):
            own = {(leaf, leaf + 1): self._messages[leaf] for leaf in range(*node)}
            mask = reduce(or_, (message.mask for message in own.values()))
            leaving.append((node, own[node] if node in own else Message(mask, self._sum_of(node, own).clone())))
        return leaving

    def _packed(self, message: Message) -> bytes:
        raw = message.raw.numpy().tobytes()
        return message.mask.to_bytes(self._mask_bytes, "little") + raw + bytes(-self._size % _ALIGN)

    def _unpacked(self, payloads: Sequence[bytes]) -> dict[Range, Message]:
        """All messages, by what they are of."""
        heard, each = {}, self._mask_bytes + _aligned(self._size)
        for worker, payload in enumerate(payloads):
            nodes, memory = self._nodes(worker), bytearray(payload)
            assert len(memory) == len(nodes) * each, f"{len(memory)} bytes came where {len(nodes) * each} were due"
            for number, node in enumerate(nodes):
                at = number * each + self._mask_bytes
                mask = int.from_bytes(memory[at - self._mask_bytes : at], "little")
                raw = (
                    torch.frombuffer(memory, dtype=torch.uint8, offset=at, count=self._size) if self._size else _NOTHING
                )
                heard[node] = Message(mask, raw)
        return heard

    def _added(self, heard: dict[Range, Message]) -> torch.Tensor:
        """What the messages decode to, added up."""
        root = (0, self._plan.leaves)
        if self._codec.summable:
            out = self._sums.of(0)
            self._codec.decode(self._sum_of(root, heard).to(self._device), self.encoder.shapes, self._seed, out)
            return out

        def read(node: Range, out: torch.Tensor) -> bool:
            if node in heard:
                self._decode(heard[node], out)
            return node in heard

        return tree_total(root, read, self._sums.of)

    def _decode(self, message: Message, out: torch.Tensor) -> None:
        if not message.mask:
            out.zero_()
            return
        self._codec.decode(message.raw.to(self._device), self.encoder.shapes, self._seed, out)
        for number, at in enumerate(self.encoder.stretches):
            if not message.mask >> number & 1:
                out[at] = 0.0

    def _sum_of(self, node: Range, messages: dict[Range, Message]) -> torch.Tensor:
        """Of messages that may be added, the one of the node."""

        def read(node: Range, out: torch.Tensor) -> bool:
            if node in messages:
                out.copy_(messages[node].raw.view(torch.float32))
            return node in messages

        return tree_total(node, read, self._message_sums.of).view(torch.uint8)

    def _total_of(self, call: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if call not in self._totals_of:
            flat = torch.zeros(self.encoder.elements, device=self._device)
            self._totals_of[call] = flat, self.encoder.windows(flat)
        return self._totals_of[call]

    def _merged(self, plain: Outcome, views: Sequence[torch.Tensor], mask: int) -> Outcome:
        """What came coded and what did not, in the order of the tensors."""
        of: dict[int, tuple[torch.Tensor, bool]] = dict(
            zip(self._plain, zip(plain.views, plain.present, strict=True), strict=True)
        )
        of |= {index: (views[number], bool(mask >> number & 1)) for number, index in enumerate(self.encoder.coded)}
        ordered = [of[index] for index in range(len(of))]
        sparse = {self._plain[index]: rows for index, rows in plain.sparse.items()}
        return replace(plain, views=[v for v, _ in ordered], present=[p for _, p in ordered], sparse=sparse)


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Levels:
    """Flats for sums in the making, made when first needed."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._flats: list[torch.Tensor] = []

    def of(self, depth: int) -> torch.Tensor:
        while len(self._flats) <= depth:
            self._flats.append(torch.empty(self._count, device=self._device))
        return self._flats[depth]


def tree_total(
    node: Range,
    read: Callable[[Range, torch.Tensor], bool],
    memory: Callable[[int], torch.Tensor],
    depth: int = 0,
) -> torch.Tensor:
    """The sum over a node of the tree, in memory(depth). `read` writes what is there as one, and says whether it was."""
    out = memory(depth)
    if not read(node, out):
        middle = split(*node)
        tree_total((node[0], middle), read, memory, depth)
        out += tree_total((middle, node[1]), read, memory, depth + 1)
    return out


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
