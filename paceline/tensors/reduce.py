"""One reduce point: the shares' gradients in, the whole batch's gradient out.

A share's gradient starts from None and is folded into flat memory when the share is done; whole
subtrees are added up at once, so a worker with many slots holds a few partial sums, never one
gradient a slot. The last fold writes straight into the group's memory and reads what came before
without changing it, so that a bucket which left too early (a second backward followed) can be
folded again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout, sum_dtype
from paceline.tensors.peers import Parts, Peers
from paceline.tensors.sparse import SparseLeaf, add_sparse, pack, unpack
from paceline.tensors.tree import Plan, Range, fold_scalars, split

MASK_BITS = 62
_WEIGHTS_AT = 2  # lanes: [left too early, sparse], then one weight a part, then presence, then the caller's


@lru_cache(maxsize=256)
def merges_after(part: Range) -> tuple[int, ...]:
    """How many sums are completed after each leaf of a subtree, in order.

    >>> merges_after((0, 4))
    (0, 1, 0, 2)
    """
    counts = [0] * (part[1] - part[0])

    def walk(a: int, b: int) -> None:
        if b - a > 1:
            mid = split(a, b)
            walk(a, mid)
            walk(mid, b)
            counts[b - 1 - part[0]] += 1

    walk(*part)
    return tuple(counts)


@dataclass
class Outcome:
    """What a reduce point agreed on."""

    views: list[torch.Tensor]
    """Each tensor's total, in memory that stays until the next point of the same number."""
    weight: float
    divisor: float
    """What the total was divided by."""
    present: list[bool]
    rows: NDArray[np.int64]
    """The callers' own lanes, one row a worker."""
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)


class Reducer:
    """Folds shares and meets the peers, over a fixed list of tensors.

    The first `count` tensors are parameters, the rest buffers, whose change is folded like a gradient.
    Either may be absent from a share. `layout`: where they lie, if that is not for this one to say.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], count: int, peers: Peers, layout: Layout | None = None) -> None:
        self.layout = Layout.of(tensors, count) if layout is None else layout
        self.peers, self._count = peers, count
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._levels: Parts = []
        self._level_views: list[list[torch.Tensor]] = []
        self._views_of: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._viewed = peers
        """The group whose memory that is of."""
        self._own_parts: Parts = []
        self._totals: dict[int, list[torch.Tensor]] = {}
        self._in_bucket: list[list[int]] = [[] for _ in self.layout.buckets]
        for index, piece in enumerate(self.layout.pieces):
            self._in_bucket[piece.bucket].append(index)
        self._mask_words = -(-len(tensors) // MASK_BITS)

    @property
    def staged(self) -> bool:
        """Whether sums go through memory of another device; the next group's may be another one's."""
        return self._device != self.peers.device

    # opening

    def open(self, plan: Plan, lanes: int) -> None:
        """A reduce point begins."""
        self._plan = plan
        self._lane_count = _WEIGHTS_AT + plan.most_parts + self._mask_words + lanes
        self.peers.open(plan, self.layout, self._lane_count)
        self._expect(plan.parts(self.peers.rank))
        self._folded = [self._part(number) for number in range(len(plan.parts(self.peers.rank)))]
        """This worker's partial sums, wherever the peers of the point's first term had them."""
        self._depth = 0
        self._weights = [0.0] * plan.most_parts
        self._stack_weights: list[float] = []
        self._mask = 0
        self._sparse: list[SparseLeaf] = []
        self._sent: set[int] = set()
        self._early: set[int] = set()
        self._left: dict[int, list[tuple[torch.Tensor | None, int, torch.Tensor]]] = {}

    def _expect(self, parts: Sequence[Range], first: int = 0) -> None:
        """The shares that will be folded, for the parts from number `first` on."""
        self._todo = [
            (leaf, number, merges, leaf == part[1] - 1)
            for number, part in enumerate(parts[first:], start=first)
            for leaf, merges in zip(range(*part), merges_after(part), strict=True)
        ]
        self._at = 0

    def carry_on(self, plan: Plan, peers: Peers, lanes: int, kept: int) -> list[int]:
        """Meet other peers instead, with the first `kept` parts as they are; the leaves that are due now.

        The old group's memory is this worker's as long as it is held: nobody else writes a slab.
        """
        old = [[flat.clone() for flat in flats] for flats in self._folded[:kept]]
        weights, self._plan, self.peers = self._weights[:kept], plan, peers
        self._lane_count = _WEIGHTS_AT + plan.most_parts + self._mask_words + lanes
        peers.open(plan, self.layout, self._lane_count)
        for number, flats in enumerate(old):
            targets = [self._part(number), peers.parts()[number]] if self.staged else [self._part(number)]
            for target in targets:
                for flat, value in zip(target, flats, strict=True):
                    flat.copy_(value)
        mine = set(plan.leaves_of(peers.rank))
        self._sparse = [leaf for leaf in self._sparse if leaf.leaf in mine]
        self._weights = weights + [0.0] * (plan.most_parts - kept)
        self._stack_weights, self._depth = [], 0
        self._sent, self._early, self._left = set(), set(), {}
        self._expect(plan.parts(peers.rank), kept)
        return [leaf for leaf, *_ in self._todo]

    def _part(self, number: int) -> list[torch.Tensor]:
        if not self.staged:
            return self.peers.parts()[number]
        while len(self._own_parts) <= number:
            self._own_parts.append(self.layout.allocate(self._device))
        return self._own_parts[number]

    def _views(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple(flat.data_ptr() for flat in flats)
        if self._viewed is not self.peers or len(self._views_of) > 64:
            self._views_of.clear()  # nothing may hold the memory of a group that is over
            self._viewed = self.peers
        if key not in self._views_of:
            self._views_of[key] = self.layout.views(flats)
        return self._views_of[key]

    def _push(self) -> list[torch.Tensor]:
        if self._depth == len(self._levels):
            self._levels.append(self.layout.allocate(self._device))
            self._level_views.append(self.layout.views(self._levels[-1]))
        self._depth += 1
        return self._level_views[self._depth - 1]

    # folding

    @property
    def on_last_leaf(self) -> bool:
        return self._at == len(self._todo) - 1

    def fold(self, leaf: int, grads: Sequence[torch.Tensor | None], weight: float) -> None:
        """Take in one share: its gradients (None where it has none) times its weight."""
        expected, part, merges, last = self._todo[self._at]
        assert leaf == expected, f"share {leaf} came when {expected} was due"
        grads = self._take_sparse(leaf, grads, weight)
        for index, grad in enumerate(grads):
            if grad is not None:
                self._mask |= 1 << index
        if last:
            self._find_changed(grads)
            for bucket, indices in enumerate(self._in_bucket):
                if bucket not in self._sent or bucket in self._early:
                    self._finish_bucket(bucket, part, merges, [grads[index] for index in indices], weight)
            self._depth -= merges
        else:
            self._fold_inner(merges, _weighted(grads, weight))
        self._fold_weight(weight, part, merges, last)
        self._at += 1

    def _find_changed(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The script may clip or mask a share's gradient after backward, when its bucket has left.

        Where the gradient now lies in the part itself, a change in place is in it already. Else it is
        compared; on a GPU, where that would wait for the device, by its version alone.
        """
        for bucket, left in self._left.items():
            for now, (then, version, sent) in zip((grads[i] for i in self._in_bucket[bucket]), left, strict=True):
                same = now is then and (now is None or now is sent or _unchanged(now, version, sent))
                if not same:
                    self._early.add(bucket)

    def _fold_inner(self, merges: int, leaf: Sequence[torch.Tensor | None]) -> None:
        if not merges:
            _copy(self._push(), leaf)
            return
        _add_into(self._level_views[self._depth - 1], leaf)
        for _ in range(merges - 1):
            self._depth -= 1
            for left, right in zip(self._levels[self._depth - 1], self._levels[self._depth], strict=True):
                left.add_(right)

    def _fold_weight(self, weight: float, part: int, merges: int, last: bool) -> None:
        for _ in range(merges):
            weight = self._stack_weights.pop() + weight
        if last:
            self._weights[part] = weight
        else:
            self._stack_weights.append(weight)

    def _finish_bucket(
        self, bucket: int, part: int, merges: int, grads: Sequence[torch.Tensor | None], weight: float
    ) -> None:
        """Complete a part's sum in one bucket; the sums on the stack are read, never changed."""
        indices, leaf = self._in_bucket[bucket], _weighted(grads, weight)
        flats = self._part(part)
        target = self._views(flats)
        mine = [target[index] for index in indices]
        if not merges:
            _copy(mine, leaf)
        else:
            top = self._level_views[self._depth - 1]
            for index, view, grad in zip(indices, mine, leaf, strict=True):
                torch.add(top[index], 0.0 if grad is None else grad, out=view)
            at = self.layout.buckets[bucket]
            flat = flats[at.flat][at.start : at.stop]
            for level in range(self._depth - 2, self._depth - 1 - merges, -1):
                torch.add(self._levels[level][at.flat][at.start : at.stop], flat, out=flat)
        if self.staged:
            at = self.layout.buckets[bucket]
            self.peers.parts()[part][at.flat][at.start : at.stop].copy_(flats[at.flat][at.start : at.stop])

    def finish_early(
        self,
        bucket: int,
        grad_of: Callable[[int], torch.Tensor | None],
        weight: float,
        swap: Callable[[int, torch.Tensor], None],
    ) -> bool:
        """This bucket's gradients of the last share are complete: let it leave now, if it can.

        It can where the part is this one share as it is. If the group reads the part only when all have
        met, `swap` lays the parameters' gradients into it: whatever the script still does to them
        counts. Else the bucket is sent, and later compared with what the script made of it.
        """
        _, part, merges, _ = self._todo[self._at]
        indices = self._in_bucket[bucket]
        if merges or weight != 1.0 or self.staged or indices[-1] >= self._count:
            return False
        views = self._views(self._part(part))
        grads = [grad_of(index) for index in indices]
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None and (grad.is_sparse or grad.requires_grad or grad.dtype != views[index].dtype):
                return False
        self._finish_bucket(bucket, part, merges, grads, weight)
        self._sent.add(bucket)
        left: list[tuple[torch.Tensor | None, int, torch.Tensor]] = []
        for index, grad in zip(indices, grads, strict=True):
            final = views[index] if grad is not None and self.peers.reads_late else grad
            if final is not grad:
                swap(index, views[index])
            left.append((final, -1 if final is None else final._version, views[index]))
        self._left[bucket] = left
        self.peers.post(bucket)
        return True

    def left_too_early(self, bucket: int) -> None:
        """A gradient changed after its bucket had left: fold it again, and have all send it again."""
        self._early.add(bucket)

    def bucket_of(self, index: int) -> int:
        return self.layout.pieces[index].bucket

    def waits(self, learned: Sequence[int]) -> list[int]:
        """How many parameters each bucket waits for, if those with a count will be touched."""
        return [sum(1 for i in indices if i < self._count and learned[i]) for indices in self._in_bucket]

    def _take_sparse(
        self, leaf: int, grads: Sequence[torch.Tensor | None], weight: float
    ) -> Sequence[torch.Tensor | None]:
        """Set sparse gradients aside: they travel as rows, and the flat sees nothing of them."""
        if not any(grad is not None and grad.is_sparse for grad in grads):
            return grads
        dense = list(grads)
        for index, grad in enumerate(grads):
            if grad is not None and grad.is_sparse:
                value = grad.coalesce()
                self._sparse.append(SparseLeaf(index, leaf, value if weight == 1.0 else value * weight))
                dense[index] = None
        return dense

    # meeting

    def commit(self, key: int, call: int, lanes: Sequence[int], mean: bool, scale: float) -> Outcome:
        """Meet the others, and take the total (over the total weight, for a mean) / scale."""
        assert self._at == len(self._todo), "a share is missing"
        for bucket in range(len(self.layout.buckets)):
            if bucket not in self._sent:
                self.peers.post(bucket)
        rows = self.peers.exchange(key, self.row(lanes))
        if rows[:, 0].any():
            early = int(np.bitwise_or.reduce(rows[:, 0]))
            self.peers.repost([b for b in range(len(self.layout.buckets)) if early >> min(b, 62) & 1])
        weight = self._total_weight(rows)
        divisor = scale * (weight if mean and weight else 1.0)
        views = self._views(self._total(call, divisor))
        return self._outcome(key, rows, weight, divisor, views)

    def row(self, lanes: Sequence[int]) -> NDArray[np.int64]:
        """What the others need to know of the shares that are folded, and the caller's own lanes."""
        early = sum(1 << min(bucket, 62) for bucket in {min(b, 62) for b in self._early})
        words = [early, len(self._sparse)]
        words += [struct.unpack("q", struct.pack("d", weight))[0] for weight in self._weights]
        full = (1 << MASK_BITS) - 1
        words += [self._mask >> (MASK_BITS * word) & full for word in range(self._mask_words)]
        return np.array([*words, *lanes], dtype=np.int64)

    def _total_weight(self, rows: NDArray[np.int64]) -> float:
        weights = rows[:, _WEIGHTS_AT : _WEIGHTS_AT + self._plan.most_parts].view(np.float64)
        return fold_scalars([float(weights[worker, part]) for worker, part in self._plan.owners], self._plan)

    def _total(self, call: int, divisor: float) -> list[torch.Tensor]:
        return self.bring(call, self.peers.total(call, divisor))

    def bring(self, call: int, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """A point's total where the tensors are; again, where some of it has come only now."""
        if not self.staged:
            return flats
        if call not in self._totals:
            self._totals[call] = self.layout.allocate(self._device)
        for target, value in zip(self._totals[call], flats, strict=True):
            target.copy_(value)
        return self._totals[call]

    def _outcome(
        self, key: int, rows: NDArray[np.int64], weight: float, divisor: float, views: list[torch.Tensor]
    ) -> Outcome:
        at = _WEIGHTS_AT + self._plan.most_parts
        words = np.bitwise_or.reduce(rows[:, at : at + self._mask_words], axis=0).tolist()
        mask = sum(word << (MASK_BITS * number) for number, word in enumerate(words))
        present = [bool(mask >> index & 1) for index in range(len(self.layout.pieces))]
        outcome = Outcome(views, weight, divisor, present, rows[:, at + self._mask_words :])
        if rows[:, 1].any():
            everyone = [leaf for raw in self.peers.gather(key, pack(self._sparse)) for leaf in unpack(raw)]
            outcome.sparse = add_sparse(everyone, self._plan.leaves, divisor, self._device)
        return outcome


def _unchanged(grad: torch.Tensor, version: int, sent: torch.Tensor) -> bool:
    return grad._version == version and (grad.is_cuda or torch.equal(grad, sent))


def _weighted(grads: Sequence[torch.Tensor | None], weight: float) -> Sequence[torch.Tensor | None]:
    return (
        grads
        if weight == 1.0
        else [None if grad is None else grad.to(sum_dtype(grad.dtype)) * weight for grad in grads]
    )


def _copy(views: Sequence[torch.Tensor], leaf: Sequence[torch.Tensor | None]) -> None:
    whole = [grad for grad in leaf if grad is not None]
    if whole and len(whole) == len(leaf):
        torch._foreach_copy_(list(views), whole)
        return
    for view, grad in zip(views, leaf, strict=True):
        view.zero_() if grad is None else view.copy_(grad)


def _add_into(views: Sequence[torch.Tensor], leaf: Sequence[torch.Tensor | None]) -> None:
    """views += leaf. An absent gradient counts as +0.0, as it does when another worker folds it."""
    whole = [grad for grad in leaf if grad is not None]
    if whole and len(whole) == len(leaf):
        torch._foreach_add_(list(views), whole)
        return
    for view, grad in zip(views, leaf, strict=True):
        view.add_(0.0 if grad is None else grad)
