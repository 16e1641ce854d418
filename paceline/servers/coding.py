"""A share's message on its way to the servers: each gets the excerpts that decode to its fragments. Pure.

Servers hold stretches of parameters, and a codec acts on all of them together: what a message says does not depend on where
the parameters are cut, so the sums are those of workers who hear whole messages.

A body is cut for some fragments, all of one server. It has, for each of their pieces, the length of the piece's excerpt (0: the
share has no gradient of that parameter); then the excerpts; then, once for each parameter, what its excerpts have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec
import numpy as np
import torch

from paceline.servers.fragments import MOST_BYTES, Fragment
from paceline.servers.pieces import Piece
from paceline.tensors.codecs import parse
from paceline.tensors.encoding import Message

_WORD = 4
AT_ONCE = 16 * MOST_BYTES
"""Fragments of so many bytes, as they are, go in one call."""


class Coding(msgspec.Struct, frozen=True):
    """The codec, as it is written, and the shapes of the parameters that it acts on, by their numbers."""

    codec: str
    shapes: dict[int, tuple[int, ...]]


class Excerpts:
    """
    >>> from paceline.servers.fragments import cut
    >>> from paceline.tensors.layout import Layout
    >>> fragments = cut(Layout.of([torch.empty(3), torch.empty(600)]))
    >>> excerpts = Excerpts(Coding("fp16", {0: (3,), 1: (600,)}), fragments)
    >>> message = Message(0b11, parse("fp16").encode(torch.arange(603.0), [(3,), (600,)], 0, torch.empty(0)))
    >>> body = excerpts.written(message, [0, 1], seed=0)
    >>> excerpts.read(body, [0, 1], fragments[1], seed=0)[:2].tolist()
    [259.0, 260.0]
    """

    def __init__(self, coding: Coding, fragments: Sequence[Fragment]) -> None:
        self._codec, self._shapes, self._fragments = parse(coding.codec), list(coding.shapes.values()), fragments
        starts = accumulate((prod(shape) for shape in self._shapes), initial=0)
        self._places = {
            param: (bit, start) for (bit, param), start in zip(enumerate(coding.shapes), starts, strict=False)
        }
        """Of each parameter, its bit in a message's mask, and which of the values is its first."""
        self.covered = [k for k, fragment in enumerate(fragments) if self.cover(fragment)]
        """The fragments whose gradients come coded."""

    def cover(self, fragment: Fragment) -> bool:
        return not fragment.buffers and fragment.pieces[0].param in self._places

    def written(self, message: Message, numbers: Sequence[int], seed: int) -> memoryview:
        """The body for the fragments of these numbers."""
        pieces = list(self._pieces(numbers))
        there = [piece for piece in pieces if message.mask >> self._places[piece.param][0] & 1]
        starts = [self._places[piece.param][1] for piece in there]
        stretches = [(start + piece.lo, start + piece.hi) for piece, start in zip(there, starts, strict=True)]
        excerpts = self._codec.excerpts(message.raw, self._shapes, seed, stretches) if there else []
        lengths, own, common = dict.fromkeys(pieces, 0), bytearray(), dict[int, memoryview]()
        for piece, excerpt in zip(there, excerpts, strict=True):
            raw = excerpt.numpy().data
            lengths[piece] = len(raw) - self._common(piece)
            own += raw[: lengths[piece]]
            own += bytes(-len(own) % _WORD)
            common[piece.param] = raw[lengths[piece] :]
        head = np.array(list(lengths.values()), dtype=np.uint32).tobytes()
        return memoryview(bytearray(head) + own + b"".join(common.values()))

    def _common(self, piece: Piece) -> int:
        return self._codec.common(self._shapes[self._places[piece.param][0]])

    def _pieces(self, numbers: Sequence[int]) -> Iterator[Piece]:
        for number in numbers:
            if not 0 <= number < len(self._fragments) or not self.cover(self._fragments[number]):
                raise ValueError(f"excerpts for fragment {number}, whose gradients come as they are")
            yield from self._fragments[number].pieces

    def read(self, body: memoryview, numbers: Sequence[int], fragment: Fragment, seed: int) -> torch.Tensor:
        """What a body that is cut for the fragments of these numbers decodes to for one of them, in new memory; ValueError if
        it cannot."""
        out = torch.zeros(fragment.stop - fragment.start)
        mine = set(fragment.pieces)
        for piece, own, common in self._cut(body, list(self._pieces(numbers))):
            if piece in mine:
                raw = torch.frombuffer(bytearray(own) + common, dtype=torch.uint8)
                target = out[piece.at : piece.at + piece.hi - piece.lo]
                self._codec.decode(raw, self._shapes, seed, target, self._places[piece.param][1] + piece.lo)
        return out

    def _cut(self, body: memoryview, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, memoryview, memoryview]]:
        """Of each piece that there is an excerpt of, that, and what it has in common with others."""
        head = len(pieces) * _WORD
        if len(body) < head:
            raise ValueError(f"{len(body)} bytes for the excerpts of {len(pieces)} pieces")
        sizes = np.frombuffer(body[:head], dtype=np.uint32).tolist()
        *starts, at = accumulate((-(-size // _WORD) * _WORD for size in sizes), initial=head)
        common: dict[int, memoryview] = {}
        for piece, size in zip(pieces, sizes, strict=True):
            if size and piece.param not in common:
                common[piece.param] = body[at : at + self._common(piece)]
                at += self._common(piece)
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for excerpts of {at}")
        for piece, size, start in zip(pieces, sizes, starts, strict=True):
            if size:
                yield piece, body[start : start + size], common[piece.param]
