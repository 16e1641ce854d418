"""Replicas that average in pairs: gossip.

Every H steps each replica takes the mean of its weights and those of one partner, drawn anew each time (`pairing`). No weights
go to anybody else; what all know of each other in between is a word each. Behind a loop over the loader all take the mean
of all, in the order of the tree: that is the run's model.

Both of a pair have the same weights behind their exchange. So if one dies before it has left its state, it gets what it had
come to from the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.data.order import mix
from paceline.strategies.averaging import Averaging, Circle, Gift
from paceline.strategies.pairing import partner
from paceline.tensors.layout import sum_dtype
from paceline.tensors.peers import Peers, Trading
from paceline.tensors.snapshot import Snapshot

_TRADE, _TRADED = mix(602), mix(603)


class Gossip(Averaging):
    """θ are this replica's own weights behind its last exchange. What it gives are its weights and buffers as they are; a
    gift's steps are those since all had the same."""

    meets_all = False

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._counts = 1.0
        """0: what it has is another's, and does not count as its own."""

    def forget(self) -> None:
        super().forget()
        self._counts = 0.0

    def give(self, number: int | None) -> Gift:
        """To a partner, or to all."""
        self._replica.refuse_thawed(self._text)
        with torch.no_grad():
            values = [param.detach().to(sum_dtype(param.dtype), copy=True) for param in self._replica.params]
            values += self._buffers.values()
        gift = Gift([0], [[*values]], [0], [self._counts], number is None)
        if number is None:
            gift.steps = [fragment.steps for fragment in self._fragments]
            for registered in range(len(self._model), len(self._fragments)):
                gift.fragments.append(registered)
                gift.differences.append(self._moves_registered())
                gift.weights.append(self._counts)
        return gift

    def given_by_another(self, gift: Gift) -> Gift:
        """Who has no partner goes on with what it has given."""
        return self.give_again(gift)

    def withdraw(self, gift: Gift) -> None:
        """Of the weights nothing was taken."""
        if gift.everything and self._replica.registered:
            self._registered.go_on(gift.differences[1])

    # an exchange

    def exchange(self, gift: Gift, slot: int, circle: Circle, peers: Peers | None = None) -> None:
        if gift.everything:
            super().exchange(gift, slot, circle, peers)
        else:
            self.exchange_again(gift, slot, circle, self.rounds)

    def exchange_again(self, gift: Gift | None, slot: int, circle: Circle, rounds: int) -> None:
        """With the partner of that round, if it is here and at this place too."""
        assert isinstance(self._peers, Trading)
        other = partner(slot, circle.met, circle.seed, rounds) if gift is not None else None
        rank = circle.slots.index(other) if other in circle.slots else None
        mine = b"" if gift is None else Snapshot([gift.weights, gift.differences]).to_bytes()
        theirs = self._peers.trade(mix(_TRADE, rounds), rank, mine)
        self._peers.gather(_TRADED, b"")  # who has its partner's weights then knows that everybody has
        if gift is not None:
            gift.theirs = Snapshot.read(memoryview(theirs)).tree if theirs else []

    def take(self, gift: Gift) -> None:
        mine = gift.differences[0]
        away = norm = 0.0
        with torch.no_grad():
            mean = _mean(gift, mine)
            for theta, own, value in zip(self._theta, mine, mean, strict=False):
                assert own is not None
                away += float((own - value).square().sum())
                norm += float(value.square().sum())
                theta.copy_(value)
            self._buffers.put(mean[len(self._theta) :])
            for moved in gift.means[1:]:
                self._registered.settle(moved.views, moved.present, 1.0)
        self.drift = (away / norm) ** 0.5 if norm else 0.0
        self.rounds += 1
        self._go_on(gift)

    def _go_on(self, gift: Gift) -> None:
        self._counts = 1.0
        with torch.no_grad():
            for number, steps in zip(gift.fragments, gift.steps, strict=True):
                self._fragments[number].steps -= steps
            for param, theta in zip(self._replica.params, self._theta, strict=True):
                param.copy_(theta)

    # what survives

    def source(self, slot: int, ahead: Sequence[int], circle: Circle, rounds: int, everything: bool) -> int | None:
        """Its partner, if that has had the exchange; else they have it again."""
        if everything:
            return ahead[0]
        other = partner(slot, circle.met, circle.seed, rounds)
        return other if other in ahead else None

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "counts": self._counts}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._counts = state["counts"]


def _mean(gift: Gift, mine: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
    """Of all, or of two; what does not count is left out."""
    own = [tensor for tensor in mine if tensor is not None]
    if gift.everything:
        return gift.means[0].views
    if not gift.theirs:
        return own
    (weight,), (theirs,) = gift.theirs
    if weight == 0.0 or gift.weights[0] == 0.0:
        return own if weight == 0.0 else theirs
    return [(a + b) / 2 for a, b in zip(own, theirs, strict=True)]
