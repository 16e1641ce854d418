"""random-k: some of the values as they are, drawn from a seed that all sides know.

Which values they are need not be said. All slots of a step draw the same places, so messages may be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.tensors.codecs.base import Shapes, Stretch, chosen, count, cut, join, number_of
from paceline.tensors.codecs.topk import within


@dataclass(frozen=True)
class RandomK:
    """4k bytes, k = share · n. Error: 0 for what is sent, |x| for the rest."""

    share: float

    summable, feedback = True, True

    @property
    def name(self) -> str:
        return f"randomk:{self.share:g}"

    def nbytes(self, shapes: Shapes) -> int:
        return 4 * chosen(self.share, count(shapes))

    def start(self, shapes: Shapes) -> torch.Tensor:
        return torch.empty(0)

    def encode(self, values: torch.Tensor, shapes: Shapes, seed: int, memory: torch.Tensor) -> torch.Tensor:
        return join(values[self._places(shapes, seed, values.device)])

    def decode(self, message: torch.Tensor, shapes: Shapes, seed: int, out: torch.Tensor, lo: int = 0) -> None:
        places = self._places(shapes, seed, out.device)
        (mine,) = within(places, [(lo, lo + out.numel())])
        (values,) = cut(message, (torch.float32, number_of(mine)))
        out.zero_()
        out[places[mine] - lo] = values

    def excerpts(
        self, message: torch.Tensor, shapes: Shapes, seed: int, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        found = within(self._places(shapes, seed, message.device), stretches)
        return [message[4 * mine.start : 4 * mine.stop] for mine in found]

    def common(self, shape: Sequence[int]) -> int:
        return 0

    def bound(self, values: torch.Tensor, shapes: Shapes) -> torch.Tensor:
        return values.abs()

    def _places(self, shapes: Shapes, seed: int, device: torch.device) -> torch.Tensor:
        total = count(shapes)
        return drawn_places(total, chosen(self.share, total), seed).to(device)


def randomk(share: float) -> RandomK:
    return RandomK(share)


@lru_cache(maxsize=4)
def drawn_places(total: int, number: int, seed: int) -> torch.Tensor:
    """One place in each of `number` stretches of about the same length: no two are equal, and they are in order.

    >>> drawn_places(10, 5, 1).tolist() == drawn_places(10, 5, 1).tolist()
    True
    """
    if not number:
        return torch.empty(0, dtype=torch.int64)
    cuts = torch.arange(number + 1) * total // number
    luck = torch.rand(number, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return cuts[:-1] + (luck * (cuts[1:] - cuts[:-1])).to(torch.int64)
