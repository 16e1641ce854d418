"""A reduce point at servers whose gradients travel coded: each share's message is cut into excerpts, and servers decode these.

They add up what came of each share, in the tree, so the sums are those of `tensors.coded`, where every worker hears whole
messages. What servers tell each other and give back is as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from paceline.servers.calling import Reply
from paceline.servers.coding import AT_ONCE, Coding, Excerpts
from paceline.servers.peers import ServedPeers
from paceline.tensors.codecs.base import Codec
from paceline.tensors.codecs.kept import Allocate
from paceline.tensors.coded import CodedReducer
from paceline.tensors.encoding import Encoder, Message, seed_of
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers
from paceline.tensors.reduce import MASK_BITS, Outcome, Reducer
from paceline.tensors.tree import Plan, Range


class CodedPeers(ServedPeers):
    """`excerpts`: how messages are cut, once that is known."""

    def __init__(self, *arguments: Any, excerpts: Callable[[], Excerpts]) -> None:
        super().__init__(*arguments)
        self._excerpts = excerpts
        self.messages: Sequence[tuple[Range, Message]] = ()
        """This worker's at the point in hand, and what they are of."""
        self.message_bytes = 0

    def _push(self) -> None:
        before = self._holders.sent
        calls = list(self._sent_coded())
        self.message_bytes += self._holders.sent - before
        plain = set(range(len(self._fragments()))).difference(self._excerpts().covered)
        self._holders.wait([*calls, *self._sent(plain)])

    def _sent_coded(self) -> Iterator[Future[Reply]]:
        excerpts, seed = self._excerpts(), seed_of(*self.at)
        for part, message in self.messages:
            for batch in self._holders.batches(excerpts.covered, AT_ONCE):
                body = excerpts.written(message, batch, seed)
                yield self._holders.out(batch, self._part(part, batch, coded=batch), body)


class ServedReducer(CodedReducer):
    """`whole`: where all tensors lie, as servers have them. Which of those that are coded have a gradient goes with the lanes."""

    peers: CodedPeers

    def __init__(
        self, tensors: Sequence[torch.Tensor], count: int, peers: Peers, codec: Codec, allocate: Allocate | None
    ) -> None:
        self.whole = Layout.of(tensors, count)
        super().__init__(tensors, count, peers, codec, allocate, self.whole)
        self._words = -(-len(self.encoder.coded) // MASK_BITS)

    def open(self, plan: Plan, lanes: int) -> None:
        super().open(plan, lanes + self._words)

    def carry_on(self, plan: Plan, peers: Peers, lanes: int, kept: int) -> list[int]:
        return super().carry_on(plan, peers, lanes + self._words, kept)

    def commit(self, key: int, call: int, lanes: Sequence[int], mean: bool, scale: float) -> Outcome:
        self.peers.messages = self._leaving()
        mask = reduce(or_, (message.mask for message in self._messages.values()), 0)
        before = self.peers.message_bytes
        outcome = Reducer.commit(self, key, call, [*lanes, *_words(mask, self._words)], mean, scale)
        self._met(self.peers.message_bytes - before)
        said = outcome.rows[:, len(lanes) :]
        mask = reduce(or_, (int(word) << MASK_BITS * at for row in said for at, word in enumerate(row)), 0)
        views = self.whole.views(self._flats)
        merged = self._merged(outcome, [views[index] for index in self.encoder.coded], mask)
        return replace(merged, rows=outcome.rows[:, : len(lanes)])

    def _total(self, call: int, divisor: float) -> list[torch.Tensor]:
        self._flats = super()._total(call, divisor)
        return self._flats


def _words(mask: int, number: int) -> list[int]:
    """A mask as so many lanes."""
    return [mask >> MASK_BITS * at & (1 << MASK_BITS) - 1 for at in range(number)]


def coding(codec: str, encoder: Encoder) -> Coding:
    """What servers have to know of it; the codec is as it was written: its name may have fewer digits."""
    return Coding(codec, {index: tuple(shape) for index, shape in zip(encoder.coded, encoder.shapes, strict=True)})
