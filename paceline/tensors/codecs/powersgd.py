"""PowerSGD (Vogels et al., 2019): a matrix as the product of a tall and a wide one, of a few columns.

    P = orthonormal(M Q),  Q = Mᵀ P,  M ≈ P Qᵀ

Both are held with their columns as rows: so a product with M reads it row by row, 2 to 20 times as fast on a
CPU (measured).

Q is remembered: each message takes one step of a power iteration, towards the largest directions of what
is sent. Tensors of one dimension, and matrices that would not get smaller, are sent as they are.

The paper adds up the P of all before it is made orthonormal, and then the Q. That is two meetings for a
step, and the common directions of all. Here each message stands for itself: one meeting, and the sum over
s slots has up to s · r directions. So messages are decoded before they are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from paceline.tensors.codecs.base import TINY, Shapes, Stretch, blocks, cut, join, number_of, spans

_SEED = 5824522
_NOISE = 1e-5
"""What rounding leaves of a row of length 1 that lies among the others."""


@dataclass(frozen=True)
class PowerSGD:
    """4r(n + m) bytes for an n × m matrix. Error: as a matrix, at most the matrix itself: ‖M − P Qᵀ‖ ≤ ‖M‖; 0 for the rest."""

    rank: int

    summable, feedback = False, True

    @property
    def name(self) -> str:
        return f"powersgd:{self.rank}"

    def nbytes(self, shapes: Shapes) -> int:
        return 4 * sum(self._sizes(shape)[0] + self._sizes(shape)[1] for shape in shapes)

    def start(self, shapes: Shapes) -> torch.Tensor:
        wide = sum(self._sizes(shape)[1] for shape in shapes)
        return torch.randn(wide, generator=torch.Generator().manual_seed(_SEED))

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        sent = []
        for flat, shape, wide in zip(_split(values, shapes), shapes, self._wide(memory, shapes), strict=True):
            if not wide.numel():
                sent.append(flat)
                continue
            matrix, older = _matrix(flat, shape), wide.view(self.rank, -1)
            tall = orthonormal(older @ matrix.t())
            newer = tall @ matrix
            sent += [tall.view(-1), newer.view(-1)]
            # A direction of nothing would stay so for ever.
            older.copy_(torch.where(newer.abs().amax(1, keepdim=True) > 0, unit_rows(newer), older))
        return join(values.new_empty(0), *sent)

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        places = list(self._places(shapes, lo, lo + out.numel()))
        (numbers,) = cut(message, (torch.float32, sum(place.sent for place in places)))
        flats = out.split([place.hi - place.lo for place in places])
        for flat, sent, place in zip(flats, numbers.split([place.sent for place in places]), places, strict=True):
            if not place.columns:
                flat.copy_(sent)
                continue
            wide = self.rank * place.columns
            tall, second = sent[: place.sent - wide].view(self.rank, -1), sent[place.sent - wide :].view(self.rank, -1)
            _multiply(tall, second, flat, place.lo)

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        (numbers,) = cut(message, (torch.float32, self.nbytes(shapes) // 4))
        each = numbers.split([sum(self._sizes(shape)) for shape in shapes])
        found = ([self._cut(each[place.tensor], place) for place in self._places(shapes, *at)] for at in stretches)
        return [join(numbers.new_empty(0), *parts) for parts in found]

    def _cut(self, sent: torch.Tensor, place: _Place) -> torch.Tensor:
        if not place.columns:
            return sent[place.lo : place.hi]
        tall, wide = sent.split([sent.numel() - self.rank * place.columns, self.rank * place.columns])
        return torch.cat([tall.view(self.rank, -1)[:, spans(place.lo, place.hi, place.columns)].reshape(-1), wide])

    def common(self, shape: Sequence[int]) -> int:
        return 4 * self._sizes(shape)[1]

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        bounds = [values.new_empty(0)]
        for flat, shape in zip(_split(values, shapes), shapes, strict=True):
            norm = flat.double().norm().float() * 1.001 + TINY if self._sizes(shape)[1] else flat.new_zeros(())
            bounds.append(norm.expand_as(flat))
        return torch.cat(bounds)

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Elements of the tall factor and of the wide one; all are in the tall one where there is no gain in two."""
        total = prod(shape)
        if len(shape) > 1 and total:
            tall, wide = self.rank * shape[0], self.rank * (total // shape[0])
            if tall + wide < total:
                return tall, wide
        return total, 0

    def _places(self, shapes: Shapes, lo: int, hi: int) -> Iterator[_Place]:
        """Where the values from `lo` to `hi` lie, tensor by tensor."""
        start = 0
        for tensor, shape in enumerate(shapes):
            total, wide = prod(shape), self._sizes(shape)[1]
            first, last = max(lo - start, 0), min(hi - start, total)
            if first < last:
                rows = number_of(spans(first, last, wide // self.rank)) if wide else 0
                sent = self.rank * rows + wide if wide else last - first
                yield _Place(tensor, first, last, wide // self.rank, sent)
            start += total

    def _wide(self, memory: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
        return list(memory.split([self._sizes(shape)[1] for shape in shapes]))


class _Place(NamedTuple):
    """Values from lo to hi of a tensor."""

    tensor: int
    lo: int
    hi: int
    columns: int
    """Of its matrix; 0: it is sent as it is."""
    sent: int
    """How many numbers they are decoded from: the rows' of the tall factor, and all of the wide one."""


def _multiply(tall: torch.Tensor, wide: torch.Tensor, out: torch.Tensor, lo: int) -> None:
    """tallᵀ wide from the `lo`-th value on. Each product and each sum is rounded by itself, so that any stretch has the bits it
    has in the whole: a library's product of matrices does not promise that."""
    row, skip = 0, lo % wide.shape[1]
    for block in blocks(out, wide.shape[1], lo):
        rows, columns = slice(row, row + len(block)), slice(skip, skip + block.shape[1])
        torch.mul(tall[0, rows, None], wide[0, columns], out=block)
        for column, line in zip(tall[1:], wide[1:], strict=True):
            block.add_(column[rows, None] * line[columns])
        row, skip = rows.stop, 0


def powersgd(rank: float) -> PowerSGD:
    return PowerSGD(int(rank))


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Its rows, each less its part along those before it, of length 1; one that is nothing stays so.

    Each is projected twice: once leaves rounding of the size of what is taken away.
    """
    done: list[torch.Tensor] = []
    for row in unit_rows(matrix).split(1):
        rest = row
        for _ in range(2):
            for other in done:
                rest = rest - other * (other * rest).sum()
        done.append(torch.where(rest.norm() > _NOISE, unit_rows(rest), 0.0))
    return torch.cat(done)


def unit_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Each of length 1, or nothing; squares of what is very small or large are never taken."""
    largest = matrix.abs().amax(1, keepdim=True)
    scaled = matrix / torch.where(largest > 0, largest, 1.0)
    return torch.where(largest > 0, scaled / scaled.norm(dim=1, keepdim=True), 0.0)


def _split(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    return list(flat.split([prod(shape) for shape in shapes]))


def _matrix(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return flat.view(shape[0], -1)
