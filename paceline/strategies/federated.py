"""Federated training: clients keep their data, train by themselves from a common θ, and a centre averages what comes back.

    round r      a sample of the clients is drawn; whoever is free takes one of them, trains it from θ on its own data, and
                 brings θ − w to the servers, with the number of its samples
    its end      Δ = Σ nᵢ (θ − wᵢ) / Σ nᵢ, in one tree over the clients' numbers; an outer optimizer makes the next θ

Clients keep nothing from round to round. So a client's training is a function of θ, the round and its data alone: whoever does
it again after a death brings the same bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.data.client_feed import client_feed
from paceline.data.clients import ClientShares
from paceline.data.loader import Feed
from paceline.errors import UsageError
from paceline.servers.messages import Apply, Begin, Begun, Bring, Centre, Ongoing, Turned
from paceline.servers.peers import stretch
from paceline.servers.rounds import Closed, Rounds
from paceline.servers.stock import Stock
from paceline.state.replica import Replica
from paceline.strategies.base import Scaled
from paceline.strategies.federation import Roster, parse
from paceline.strategies.registered import Registered
from paceline.tensors.peers import Peers

_ASK_EVERY_S = 0.2


class Federated(Registered):
    same_bits = True
    _kind = Rounds

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._plan = parse(text)
        self.rounds = self._plan.rounds
        self.shares: list[ClientShares] = []
        """Of each prepared loader."""
        self._seeds: list[int] = []
        self._loader = self._round = self._told = 0
        """Whose clients, and in which round, this worker trains; bytes that were told of."""
        self._asked_s = 0.0
        self._beside: list[Any] = []
        """What lies at the servers beside θ, from a checkpoint or for one."""
        self._theta: list[torch.Tensor] = []
        """θ where the model is, for FedProx."""
        self.history: dict[int, dict[str, Any]] = {}
        """Of each round, who took part."""

    def feed(self, loader: Any, seed: int) -> Feed:
        feed, shares = client_feed(loader, self._plan, seed)
        self.shares.append(shares)
        self._seeds.append(seed)
        return feed

    def roster(self, loader: int, number: int) -> Roster:
        return self._plan.roster(self._seeds[loader], number, len(self.shares[loader].clients))

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        super().attach(replica, peers, mean, scaled)
        for optimizer in replica.optimizers if self._plan.prox else ():
            optimizer.register_step_pre_hook(self._pull_towards_theta)

    def _stocked(self) -> Stock:
        centre = Centre(self._plan.quorum, self._plan.grace, self._plan.outer)
        return Stock(self._holders, self._replica, self._layout, "async", self._seat.slots, centre=centre)

    # what the servers hold

    def lay(self) -> None:
        register = self._register_at_rest or Rounds(1, count=self._count, steps=self._count).encode()
        self._stock.lay(self._count, register, self._beside)
        self._beside = []

    def capture(self) -> dict[str, Any]:
        history = list(self.history.values())
        return {**super().capture(), "beside": self._beside, "history": history}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._beside = state["beside"]
        self.history = {each["round"]: each for each in state["history"]}

    @contextmanager
    def _filled(self) -> Iterator[None]:
        self._beside = self._stock.beside()
        yield
        self._beside = []

    # a round

    def total(self, loader: int) -> int:
        """How many clients are to train in the next round."""
        self._loader = loader
        return len(self.roster(loader, self._count).present)

    def _beginning(self, total: int, epoch: int, loader: int, last: int) -> Begin:
        here, members = self.shares[loader].here, list(self._seat.view().members)
        if here is not None:
            present = self.roster(loader, self._count).present
            here = [leaf for leaf, client in enumerate(present) if client in here]
        return Begin(self._seat.worker, self._stretch, total, epoch, loader, members, here)

    def begin_stretch(
        self, total: int, epoch: int, loader: int, notes: Callable[[], bytearray], last: int = 0
    ) -> Begun:
        begun = super().begin_stretch(total, epoch, loader, notes, last)
        self._round = begun.first
        return begun

    def take(self) -> None:
        """A client begins: from θ, with optimizers that remember nothing."""
        self._to_model()
        self._forget()
        if self._plan.prox:
            self._theta = [param.detach().clone() for param in self._replica.params]

    def _forget(self) -> None:
        self._stock.empty_optimizers()
        for param in self._replica.params:
            param.grad = None

    def _pull_towards_theta(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        its_own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for param, theta in zip(self._replica.params, self._theta, strict=True):
            if param.grad is None or id(param) not in its_own:
                continue
            if param.grad.layout != torch.strided:
                raise UsageError(
                    f"--strategy {self._text}: FedProx pulls every row of a parameter towards θ, and a sparse gradient has only some: "
                    "leave sparse=True out of the embedding, or prox="
                )
            param.grad.add_(param.detach() - theta, alpha=self._plan.prox)

    def bring(self, leaf: int) -> int:
        """A client has trained: what came of it lies at the servers, and at their backups, when this returns. The bytes that
        have moved since the last one."""
        start = time.perf_counter()
        count = len(self._replica.params)
        with torch.no_grad():
            for view, theta, param in zip(self._out_of, self._stock.value_of, self._replica.params, strict=False):
                torch.sub(theta, param.to(theta), out=view)
            for view, move in zip(self._out_of[count:], self._buffers.take(), strict=True):
                view.zero_() if move is None else torch.neg(move.to(view), out=view)
        self._holders.through(partial(self._bring, leaf))
        self._forget()
        self._spent_s += time.perf_counter() - start
        moved, self._told = self._holders.moved - self._told, self._holders.moved
        return moved

    def _bring(self, leaf: int) -> None:
        fragments, calls = self._stock.fragments, []
        for batch in self._holders.batches(range(len(fragments))):
            body = [stretch(self._out, fragments[k]) for k in batch]
            calls.append(self._holders.out(batch, Bring(self._round, leaf, batch), *body))
        self._holders.wait(calls, self._check)

    @property
    def ongoing(self) -> bool:
        """Whether the round is still open. Asked now and then: it ends without this worker's client only by a quorum."""
        now = time.monotonic()
        if not self._plan.quorum or now - self._asked_s < _ASK_EVERY_S:
            return True
        self._asked_s = now
        return bool(self._ask(Ongoing(self._stretch)).message.yes)

    def end_stretch(self, turned: Turned) -> None:
        if turned.closed is not None:
            self._holders.through(partial(self._end_round, turned.count, turned.closed))
            self._note(turned.closed)
        super().end_stretch(turned)

    def _end_round(self, count: int, closed: Closed) -> None:
        """All say the same: whoever is first."""
        body = memoryview(msgspec.msgpack.encode(closed))
        self._holders.wait(
            [self._holders.out(mine, Apply(count, mine), body) for mine in self._holders.of_each()], self._check
        )

    def _note(self, closed: Closed) -> None:
        present, dropped = self.roster(self._loader, self._round)
        self.history[self._round] = {
            "round": self._round,
            "clients": [present[leaf] for leaf, _ in closed.arrived],
            "dropped": list(dropped),
            "lacking": [present[leaf] for leaf in closed.lacking],
            "samples": sum(samples for _, samples in closed.arrived),
            "bytes": closed.moved,
        }

    def report(self) -> dict[str, Any]:
        history = [self.history[number] for number in sorted(self.history)]
        counts = Counter(len(each["clients"]) for each in history)
        return {
            "rounds": len(history),
            "participants": {str(count): counts[count] for count in sorted(counts)},
            "by_round": history,
            "bytes_moved": sum(each["bytes"] for each in history),
        }
