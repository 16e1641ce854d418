"""Replicas that train apart and meet now and then: local, postlocal, diloco and streaming.

Every worker is one replica with an optimizer of its own. What they exchange is how far each has come from θ, the weights
that they had in common last: Δ = mean(θ − θᵢ), added up in the fixed tree over the slots, each counted by its samples.
An outer optimizer takes Δ for a gradient; its state is the same everywhere, and so is the new θ. See `rhythm` for when.
A codec (`diloco:50+int8`) acts on each replica's difference, and what it leaves out stays with the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.data.order import mix
from paceline.errors import UsageError
from paceline.replica import Replica
from paceline.servers.register import Register
from paceline.strategies.base import Scaled
from paceline.strategies.buffers import Buffers
from paceline.strategies.met import Met
from paceline.strategies.outer import State
from paceline.strategies.rhythm import parse
from paceline.tensors import codecs
from paceline.tensors.coded import CodedReducer
from paceline.tensors.layout import sum_dtype
from paceline.tensors.peers import Peers
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.tree import Plan

_EXCHANGE = mix(502)


@dataclass
class Fragment:
    """Some of the parameters, exchanged together; the first one has the buffers, too."""

    params: list[int]
    reducer: Reducer
    states: list[State]
    steps: int = 0
    samples: int = 0
    """Trained since its last exchange; by this replica, which may have had no sample in some step."""
    count: int = 0
    """Outer steps."""


@dataclass
class Gift:
    """What a replica gives to the others at one moment: how far its weights, and buffers, have come."""

    fragments: list[int]
    differences: list[list[torch.Tensor | None]]
    steps: list[int]
    weights: list[float]
    """For each fragment: steps since its last exchange, and samples."""
    means: list[Outcome] = field(default_factory=list)
    """Of each fragment, once all have met for it."""


class Averaging:
    same_bits = True

    def __init__(self, text: str) -> None:
        """As it is written for --strategy."""
        self._text = text
        plain, _, codec = text.partition("+")
        self.rhythm = parse(plain)
        self._codec = codecs.parse(codec) if codec else None
        self._sent_before, self.rounds = 0, 0
        self.drift = 0.0
        """How far this one had come from the mean when they met last, by θ's norm."""
        self.met = Met()

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        if scaled is not None:
            raise UsageError(
                f"--precision fp16 with --strategy {self._text}: a gradient that overflows must be dropped by all workers "
                "together, and these do nothing together; use --precision bf16"
            )
        self._replica, self._peers = replica, peers
        self._build()

    def _build(self) -> None:
        replica = self._replica
        self._theta = [param.detach().to(sum_dtype(param.dtype), copy=True) for param in replica.params]
        self._buffers = Buffers(replica)
        self._buffers.begin()
        self._fragments = []
        for number, params in enumerate(cut_in_order([p.numel() for p in replica.params], self.rhythm.fragments)):
            tensors = [replica.params[index] for index in params]
            buffers = replica.buffers if number == 0 else []
            states = [self.rhythm.outer.begin(self._theta[index]) for index in params]
            self._fragments.append(Fragment(params, self._reducer([*tensors, *buffers], len(tensors)), states))

    def _reducer(self, tensors: list[torch.Tensor], count: int) -> Reducer:
        if self._codec is None:
            return Reducer(tensors, count, self._peers)
        return CodedReducer(tensors, count, self._peers, self._codec)

    def meet(self, peers: Peers) -> None:
        self._sent_before += self._peers.sent_bytes
        self._peers = peers
        for fragment in self._fragments:
            fragment.reducer.peers = peers

    # an exchange

    @property
    def apart(self) -> bool:
        """Whether something was trained that is not exchanged."""
        return any(fragment.steps for fragment in self._fragments)

    def trained(self, samples: int) -> None:
        """A step, with so many."""
        for fragment in self._fragments:
            fragment.steps += 1
            fragment.samples += samples

    def give(self, number: int | None) -> Gift:
        """A fragment as it is now, or all of them."""
        if self._replica.thawed:
            raise UsageError(
                f"a frozen parameter has become trainable, and the others do not know: with --strategy {self._text} all that "
                "will ever be trained must be so when the loop begins"
            )
        numbers = list(range(len(self._fragments))) if number is None else [number]
        differences: list[list[torch.Tensor | None]] = []
        weights = [float(self._fragments[k].samples) for k in numbers]
        with torch.no_grad():
            moves = self._buffers.take() if 0 in numbers else []
            for k, weight in zip(numbers, weights, strict=True):
                mine: list[torch.Tensor | None] = [
                    self._theta[index] - self._replica.params[index] for index in self._fragments[k].params
                ]
                mine += moves if k == 0 else []
                differences.append(mine if weight else [None] * len(mine))
        return Gift(numbers, differences, [self._fragments[k].steps for k in numbers], weights)

    def exchange(self, gift: Gift, slot: int, plan: Plan) -> None:
        """Meet the others for it; again from its beginning, if a peer was lost in the middle."""
        gift.means = []
        for number, mine, weight in zip(gift.fragments, gift.differences, gift.weights, strict=True):
            reducer = self._fragments[number].reducer
            with torch.no_grad():
                if isinstance(reducer, CodedReducer):
                    reducer.begin(self.rounds, 0)
                reducer.open(plan, 0)
                reducer.fold(slot, mine, weight)
                gift.means.append(reducer.commit(mix(_EXCHANGE, self.rounds, number), 0, (), True, 1.0))

    def take(self, gift: Gift, own: float) -> None:
        """What became of it comes in; the own weights count for `own` there."""
        away = norm = 0.0
        with torch.no_grad():
            for number, mine, mean in zip(gift.fragments, gift.differences, gift.means, strict=True):
                fragment = self._fragments[number]
                fragment.count += 1
                for place, index in enumerate(fragment.params):
                    theta, delta, difference = self._theta[index], mean.views[place], mine[place]
                    if difference is not None:
                        away += float((difference - delta).square().sum())
                    self.rhythm.outer.step(theta, delta, fragment.states[place], fragment.count)
                    norm += float(theta.square().sum())
                if number == 0:
                    count = len(fragment.params)
                    self._buffers.settle(mean.views[count:], mean.present[count:], 1.0)
        self.drift = (away / norm) ** 0.5 if norm else 0.0
        self.rounds += 1
        self._go_on(gift, own)

    def _go_on(self, gift: Gift, own: float) -> None:
        with torch.no_grad():
            for number, steps, weight in zip(gift.fragments, gift.steps, gift.weights, strict=True):
                self._fragments[number].samples -= int(weight)
                self._fragments[number].steps -= steps
                for index in self._fragments[number].params:
                    theta, param = self._theta[index], self._replica.params[index]
                    param.copy_(param * own + theta * (1 - own) if own else theta)

    def catch_up(self, gift: Gift, slot: int, slots: int, own: float, state: dict[str, Any]) -> None:
        """The same for one who comes too late for that: this is what another one has had behind it."""
        for number, mine, weight in zip(gift.fragments, gift.differences, gift.weights, strict=True):
            reducer = self._fragments[number].reducer
            if isinstance(reducer, CodedReducer):
                with torch.no_grad():
                    reducer.begin(self.rounds, 0)
                    reducer.missed(slot, slots, mine, weight)
        self._take_common(state)
        if 0 in gift.fragments and self._replica.buffers:
            torch._foreach_copy_(self._replica.buffers, self._buffers.start)
        self._go_on(gift, own)

    # what survives

    def capture(self) -> dict[str, Any]:
        """Behind an exchange: what all have in common then, and what this one has trained that is not exchanged yet."""
        return {
            "rounds": self.rounds,
            "theta": self._theta,
            "buffers": self._buffers.start,
            "outer": [[fragment.count, fragment.states] for fragment in self._fragments],
            "trained": [[fragment.steps, fragment.samples] for fragment in self._fragments],
            "met": self.met.capture(),
            "drift": self.drift,
            "kept": [r.kept.own() if isinstance(r, CodedReducer) else [] for r in self._reducers],
        }

    @property
    def _reducers(self) -> list[Reducer]:
        return [fragment.reducer for fragment in self._fragments]

    def restore(self, state: dict[str, Any]) -> None:
        self._take_common(state)
        for fragment, (steps, samples) in zip(self._fragments, state["trained"], strict=True):
            fragment.steps, fragment.samples = steps, samples
        for reducer, kept in zip(self._reducers, state["kept"], strict=True):
            if isinstance(reducer, CodedReducer):
                reducer.kept.take_back(kept)

    def _take_common(self, state: dict[str, Any]) -> None:
        self.rounds, self.drift, self.met = state["rounds"], state["drift"], Met.restored(state["met"])
        with torch.no_grad():
            torch._foreach_copy_([*self._theta, *self._buffers.start], [*state["theta"], *state["buffers"]])
            for fragment, (count, states) in zip(self._fragments, state["outer"], strict=True):
                fragment.count = count
                for mine, theirs in zip(fragment.states, states, strict=True):
                    for name, tensor in theirs.items():
                        mine[name].copy_(tensor)

    def whole(self) -> AbstractContextManager[Register | None]:
        return nullcontext()

    def wire_bytes(self) -> int:
        return self._sent_before + self._peers.sent_bytes

    def report(self) -> dict[str, Any]:
        sent = sum(r.sent_bytes for r in self._reducers if isinstance(r, CodedReducer))
        plain = sum(r.plain_bytes for r in self._reducers if isinstance(r, CodedReducer))
        compression = {"compression": round(sent / plain, 5)} if plain else {}
        return {**self.met.report(self.drift), **compression}

    def close(self) -> None:
        return


def cut_in_order(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers 0, 1, … in so many stretches of about the same size; some are empty if there are more parts than numbers.

    >>> cut_in_order([4, 1, 1, 4], 2)
    [[0, 1], [2, 3]]
    """
    total, at = sum(sizes), 0
    found: list[list[int]] = [[] for _ in range(parts)]
    for number, size in enumerate(sizes):
        middle = at + size / 2
        found[min(parts - 1, int(middle * parts / total)) if total else 0].append(number)
        at += size
    return found
