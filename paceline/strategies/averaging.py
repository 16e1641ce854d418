"""Replicas that train apart and meet now and then: local, postlocal, diloco and streaming.

Every worker is one replica with an optimizer of its own. What they exchange is how far each has come from θ, the weights
that they had in common last: Δ = mean(θ − θᵢ), added up in the fixed tree over the slots, each counted by its samples.
An outer optimizer takes Δ for a gradient; its state is the same everywhere, and so is the new θ. See `rhythm` for when.
A codec (`diloco:50+int8`) acts on each replica's difference, and what it leaves out stays with the replica.
Modules that the script has registered, an EMA say, go on from their mean where everything is exchanged: behind a loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.order import mix
from paceline.errors import UsageError
from paceline.servers.outer import State
from paceline.servers.register import Register
from paceline.state.replica import Replica
from paceline.strategies.base import Scaled
from paceline.strategies.buffers import Buffers
from paceline.strategies.met import Met
from paceline.strategies.rhythm import parse
from paceline.tensors import codecs
from paceline.tensors.coded import CodedReducer
from paceline.tensors.layout import sum_dtype
from paceline.tensors.peers import Peers
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.tree import Plan, Range

if TYPE_CHECKING:
    from paceline.apart.beside import Beside

_EXCHANGE = mix(502)


@dataclass
class Fragment:
    """Some of the parameters, exchanged together; the first one has the buffers, too. One behind them has what is registered."""

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
    everything: bool
    """Whether behind it all weights are the same everywhere."""
    means: list[Outcome] = field(default_factory=list)
    """Of each fragment, once all have met for it."""
    met: list[int] = field(default_factory=list)
    """Whose gifts are in them: the slots."""
    theirs: list[Any] = field(default_factory=list)
    """Or what a partner has given, if there was one."""


@dataclass(frozen=True)
class Circle:
    """Who meets for an exchange."""

    slots: Sequence[int]
    """Theirs, in the order of ranks."""
    met: Sequence[int]
    """Of all who had a part in it, in order; some of them may be further now."""
    leaves: int
    """How many slots there are."""
    seed: int


class Averaging:
    same_bits = True
    meets_all = True
    """Whether an exchange of all weights has the same result as one of everything."""

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
        self.present: list[int] = []
        """The slots of those who met last; none: they have not met yet, and are all there."""
        self.dropped: list[list[int]] = []
        """Replicas that the run has gone on without: the slot, and the steps that were done."""
        self.beside: Beside | None = None
        """Where exchanges go on while this replica trains, if they do."""

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
        self._buffers = Buffers(replica.buffers, replica.buffer_homes)
        self._buffers.begin()
        self._fragments = []
        for number, params in enumerate(cut_in_order([p.numel() for p in replica.params], self.rhythm.fragments)):
            tensors = [replica.params[index] for index in params]
            buffers = replica.buffers if number == 0 else []
            states = [self.rhythm.outer.begin(self._theta[index]) for index in params]
            self._fragments.append(Fragment(params, self._reducer([*tensors, *buffers], len(tensors)), states))
        self._model = range(len(self._fragments))
        """Its fragments."""
        self._registered = Buffers(replica.registered, replica.registered_homes)
        self._registered.begin()
        if replica.registered:
            reducer = Reducer([tensor.to(replica.device) for tensor in replica.registered], 0, self._peers)
            self._fragments.append(Fragment([], reducer, []))

    def _reducer(self, tensors: list[torch.Tensor], count: int) -> Reducer:
        if self._codec is None:
            return Reducer(tensors, count, self._peers)
        return CodedReducer(tensors, count, self._peers, self._codec)

    def meet(self, peers: Peers) -> None:
        """The reducers are told when they are used: a thread may be at one of them now."""
        self._sent_before += self._peers.sent_bytes
        self._peers = peers

    # an exchange

    @property
    def apart(self) -> bool:
        """Whether something was trained that is not exchanged."""
        return any(fragment.steps for fragment in self._fragments)

    def trained(self, samples: int, steps: int = 1) -> None:
        """A step, with so many; or more of one that has been counted."""
        for fragment in self._fragments:
            fragment.steps += steps
            fragment.samples += samples

    def forget(self) -> None:
        """What was trained since the last exchange does not count: others have trained it."""
        for fragment in self._fragments:
            fragment.samples = 0

    def give(self, number: int | None) -> Gift:
        """A fragment as it is now, or all of them."""
        self._replica.refuse_thawed(self._text)
        numbers = self._all_that_is_apart() if number is None else [number]
        differences: list[list[torch.Tensor | None]] = []
        weights = [float(self._fragments[k].samples) for k in numbers]
        with torch.no_grad():
            moves = self._buffers.take() if 0 in numbers else []
            for k, weight in zip(numbers, weights, strict=True):
                mine: list[torch.Tensor | None] = [
                    self._theta[index] - self._replica.params[index] for index in self._fragments[k].params
                ]
                mine += self._moves_registered() if k not in self._model else moves if k == 0 else []
                differences.append(mine if weight else [None] * len(mine))
        return Gift(numbers, differences, [self._fragments[k].steps for k in numbers], weights, number is None)

    def _all_that_is_apart(self) -> list[int]:
        """An exchange of weights that nobody has trained is not nothing: an outer optimizer goes on by its momentum."""
        apart = any(self._fragments[number].steps for number in self._model)
        return [number for number in range(len(self._fragments)) if apart or number not in self._model]

    @torch.no_grad()
    def _moves_registered(self) -> list[torch.Tensor | None]:
        return [None if move is None else move.to(self._replica.device) for move in self._registered.take()]

    def give_again(self, gift: Gift) -> Gift:
        """The same, after more has been trained."""
        return self.give(None if gift.everything else gift.fragments[0])

    def given_by_another(self, gift: Gift) -> Gift:
        """The same, now that this replica has another one's state. What does not count is nothing, whoever gives it."""
        return gift

    def withdraw(self, gift: Gift) -> None:
        """There is more to be trained before it counts: buffers go on from where they were."""
        self._undo(gift)
        for number, mine in zip(gift.fragments, gift.differences, strict=True):
            if number == 0:
                self._buffers.go_on(mine[len(self._fragments[0].params) :])
            elif number not in self._model:
                self._registered.go_on(mine)

    def exchange(self, gift: Gift, slot: int, circle: Circle, peers: Peers | None = None) -> None:
        """Meet the others for it, in a group of its own if one is given; again from its beginning, if a peer was lost in the
        middle. Nothing but the gift and what a codec keeps is changed: this may be beside the training."""
        peers, plan = peers or self._peers, plan_of(circle.slots, circle.leaves)
        self._undo(gift)
        gift.met = sorted(circle.slots)
        for number, mine, weight in zip(gift.fragments, gift.differences, gift.weights, strict=True):
            reducer = self._fragments[number].reducer
            reducer.peers = peers
            with torch.no_grad():
                if isinstance(reducer, CodedReducer):
                    reducer.begin(self.rounds, 0)
                reducer.open(plan, 0)
                for leaf in plan.leaves_of(peers.rank):
                    counts = leaf == slot and weight > 0
                    reducer.fold(leaf, mine if counts else [None] * len(mine), weight if counts else 0.0)
                gift.means.append(reducer.commit(mix(_EXCHANGE, self.rounds, number), 0, (), True, 1.0))

    def _undo(self, gift: Gift) -> None:
        """What has come of it does not count: a codec keeps what it kept before."""
        for number, _ in zip(gift.fragments, gift.means, strict=False):
            reducer = self._fragments[number].reducer
            if isinstance(reducer, CodedReducer):
                reducer.kept.undo()
        gift.means, gift.met = [], []

    def take(self, gift: Gift) -> None:
        """What became of it comes in."""
        away = norm = 0.0
        with torch.no_grad(), self._buffers_going_on(gift):
            for number, mine, mean in zip(gift.fragments, gift.differences, gift.means, strict=True):
                if number not in self._model:
                    self._registered.settle(mean.views, mean.present, 1.0)
                    continue
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
        if any(number in self._model for number in gift.fragments):
            self.drift = (away / norm) ** 0.5 if norm else 0.0
        self.rounds += 1
        self._go_on(gift)

    @contextmanager
    def _buffers_going_on(self, gift: Gift) -> Iterator[None]:
        """Where training went on beside the exchange, they have moved since they were given."""
        beside = self.rhythm.overlap and 0 in gift.fragments and not gift.everything
        later = self._buffers.take() if beside else []
        yield
        if later:
            self._buffers.go_on(later)

    def _go_on(self, gift: Gift) -> None:
        """This replica's weights count for something beside what all have come to, unless everything is exchanged."""
        own = 0.0 if gift.everything else self.rhythm.mix
        with torch.no_grad():
            for number, steps, weight in zip(gift.fragments, gift.steps, gift.weights, strict=True):
                self._fragments[number].samples -= int(weight)
                self._fragments[number].steps -= steps
                for index in self._fragments[number].params:
                    theta, param = self._theta[index], self._replica.params[index]
                    param.copy_(param * own + theta * (1 - own) if own else theta)

    def source(self, slot: int, ahead: Sequence[int], circle: Circle, rounds: int, everything: bool) -> int | None:
        """From whom a replica that comes too late for that exchange takes what came of it: all have the same behind it."""
        return ahead[0]

    def exchange_again(self, gift: Gift | None, slot: int, circle: Circle, rounds: int) -> None:
        """For those who have no source; who needs nothing has no gift."""
        raise AssertionError("behind an exchange all have the same")

    def catch_up(self, gift: Gift, slot: int, slots: int, state: dict[str, Any]) -> None:
        """The same for one who comes too late for that: this is what another one has had behind it."""
        self._undo(gift)
        for number, mine, weight in zip(gift.fragments, gift.differences, gift.weights, strict=True):
            reducer = self._fragments[number].reducer
            if isinstance(reducer, CodedReducer):
                with torch.no_grad():
                    reducer.begin(self.rounds, 0)
                    reducer.missed(slot, slots, mine, weight)
        with self._buffers_going_on(gift):
            self.take_common(state)
            if 0 in gift.fragments:
                self._buffers.go_back()
        if gift.everything:
            self._registered.go_back()
        self._go_on(gift)

    def miss(self, gift: Gift) -> None:
        """An exchange of the others, which this one has no part in."""
        self._undo(gift)
        self.rounds += 1
        for number, steps in zip(gift.fragments, gift.steps, strict=True):
            self._fragments[number].steps -= steps

    # what survives

    def capture(self) -> dict[str, Any]:
        """Behind an exchange: what all have in common then, and what this one has trained that is not exchanged yet."""
        return {
            "rounds": self.rounds,
            "present": self.present,
            "dropped": self.dropped,
            "theta": self._theta,
            "registered": self._registered.start,
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
        self.take_common(state)
        for fragment, (steps, samples) in zip(self._fragments, state["trained"], strict=True):
            fragment.steps, fragment.samples = steps, samples
        for reducer, kept in zip(self._reducers, state["kept"], strict=True):
            if isinstance(reducer, CodedReducer):
                reducer.kept.take_back(kept)

    def begin_anew(self) -> None:
        """This is the state of another one, whose shares are its own."""
        self.forget()
        for reducer in self._reducers:
            if isinstance(reducer, CodedReducer):
                reducer.kept.forget()

    def take_history(self, state: dict[str, Any]) -> None:
        """What all know of the rounds so far."""
        self.met = Met.restored(state["met"])
        self.present, self.dropped = list(state["present"]), [list(each) for each in state["dropped"]]

    def take_common(self, state: dict[str, Any]) -> None:
        """What all have had behind the last exchange."""
        self.rounds, self.drift = state["rounds"], state["drift"]
        self.take_history(state)
        if len(state["registered"]) != len(self._replica.registered):
            raise UsageError(
                f"{len(state['registered'])} tensors of registered modules are in the run's state, and {len(self._replica.registered)} here: "
                "a run goes on with what it was begun with, so register the same"
            )
        with torch.no_grad():
            common = [*self._theta, *self._buffers.start, *self._registered.start]
            torch._foreach_copy_(common, [*state["theta"], *state["buffers"], *state["registered"]])
            for fragment, (count, states) in zip(self._fragments, state["outer"], strict=True):
                fragment.count = count
                for mine, theirs in zip(fragment.states, states, strict=True):
                    for name, tensor in theirs.items():
                        mine[name].copy_(tensor)

    def whole(self) -> AbstractContextManager[Register | None]:
        return nullcontext()

    def wire_bytes(self) -> int:
        return self._sent_before + self._peers.sent_bytes + (self.beside.sent_bytes if self.beside else 0)

    def report(self) -> dict[str, Any]:
        sent = sum(r.sent_bytes for r in self._reducers if isinstance(r, CodedReducer))
        plain = sum(r.plain_bytes for r in self._reducers if isinstance(r, CodedReducer))
        compression = {"compression": round(sent / plain, 5)} if plain else {}
        dropped = [{"replica": slot, "step": step} for slot, step in self.dropped]
        return {**self.met.report(self.drift), **compression, **({"dropped": dropped} if dropped else {})}

    def close(self) -> None:
        if self.beside is not None:
            self.beside.close()


def plan_of(slots: Sequence[int], leaves: int) -> Plan:
    """Each worker has its own slot; the first one has those, too, that nobody brings anything for.

    >>> plan_of([2, 0], 4).ranges
    (((2, 3), (1, 2), (3, 4)), ((0, 1),))
    """
    ranges: list[tuple[Range, ...]] = [((slot, slot + 1),) for slot in slots]
    ranges[0] += tuple((slot, slot + 1) for slot in range(leaves) if slot not in slots)
    return Plan(leaves, tuple(ranges))


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
