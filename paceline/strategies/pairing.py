"""Who averages with whom: in each round, replicas in random pairs. Pure.

Every pair is as likely as any other, for any number of replicas, and both of a pair come to the same weights. A one-peer
exponential graph mixes a little faster (log2 n rounds, if n is a power of two), but there a replica takes from one and gives
to another: after a death nobody else would have what a lost one had come to.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.order import mix

_PAIRS = 601


def pairs(slots: Sequence[int], seed: int, rounds: int) -> list[tuple[int, int]]:
    """Of an odd number one is left out.

    >>> pairs([0, 1, 2, 3], 0, 0), pairs([0, 1, 2, 3], 0, 1), pairs([0, 2, 3], 0, 1)
    ([(1, 2), (0, 3)], [(0, 1), (2, 3)], [(0, 3)])
    """
    order = sorted(slots, key=lambda slot: (mix(seed, _PAIRS, rounds, slot), slot))
    return [(min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=False)]


def partner(slot: int, slots: Sequence[int], seed: int, rounds: int) -> int | None:
    """With whom this one averages, of those that are there."""
    return next((a + b - slot for a, b in pairs(slots, seed, rounds) if slot in (a, b)), None)
