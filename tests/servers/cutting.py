"""Parameters cut into pieces at random, as servers hold them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from paceline.servers.carried import Carried
from paceline.servers.optimizers import Engine, cut, flat
from paceline.servers.pieces import LINE, Piece


def random_pieces(
    params: Sequence[torch.Tensor], dice: random.Random, held: Sequence[int] | None = None
) -> list[Piece]:
    """All of these parameters (all, unless told which), each in one to four pieces, in any order."""
    pieces = []
    for number in range(len(params)) if held is None else held:
        numel = params[number].numel()
        lines = range(LINE, numel, LINE)
        cuts = sorted(dice.sample(lines, min(len(lines), dice.randrange(4))))
        pieces += [Piece(number, lo, hi) for lo, hi in zip([0, *cuts], [*cuts, numel], strict=True)]
    dice.shuffle(pieces)
    return pieces


def stretch(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A copy: servers have memory of their own."""
    return flat(tensor.detach())[piece.lo : piece.hi].clone()


class Servers:
    """A parameter server's share each, without the servers: every piece lies on one of them."""

    def __init__(
        self,
        carried: Carried,
        params: Sequence[torch.Tensor],
        count: int,
        dice: random.Random,
        state: dict[str, object],
    ) -> None:
        held = sorted(number for group in carried.groups for number in group.params if number is not None)
        deal: list[list[Piece]] = [[] for _ in range(count)]
        for piece in random_pieces(params, dice, held):
            dice.choice(deal).append(piece)
        self.values = [[stretch(params[piece.param], piece) for piece in pieces] for pieces in deal]
        self.engines = [Engine(carried, pieces, values) for pieces, values in zip(deal, self.values, strict=True)]
        for engine in self.engines:
            engine.restore(cut(state, carried, engine.pieces))

    def apply(self, sums: Sequence[torch.Tensor | None], hyper: list[dict[str, object]], clip: float = 1.0) -> None:
        for engine in self.engines:
            pieces = [(sums[piece.param], piece) for piece in engine.pieces]
            engine.apply([None if whole is None else stretch(whole, piece) for whole, piece in pieces], hyper, clip)

    def held(self) -> list[tuple[Piece, dict[str, object]]]:
        return [both for e in self.engines for both in zip(e.pieces, e.capture(), strict=True)]

    def pull(self, into: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for engine, values in zip(self.engines, self.values, strict=True):
                for piece, value in zip(engine.pieces, values, strict=True):
                    flat(into[piece.param])[piece.lo : piece.hi] = value
