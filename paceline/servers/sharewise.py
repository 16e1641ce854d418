"""A group whose shares go to the servers one by one: a point is met once each share has come, whoever computed it.

In `ServedPeers` the workers meet each other behind the sums. Here they do not, so that nobody waits for a worker that is
slow: what the meeting was for lies with the first fragment. A part brings its share's lanes there, each worker a word of
its own. A point is *met* when all fragments have their sum; the first one's is sealed with the lanes of the shares in it and
everybody's last word, and that is what all workers get, whenever they come. They may come some steps later
(`clocks.BEHIND`), and the others wait for a worker that is further behind.

A worker sends its part of the first fragment last. So where that is sealed, the others have all that they need, unless a
server is lost.

When a worker dies, whoever waits for a point that is not sealed ends the term at it (`Ended`), for all: those who come later
find it over there, too. A point that is sealed is met in the term in which it was opened, so all enter the next term at the
same point.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.clocks import BEHIND
from paceline.servers.holders import MovedError
from paceline.servers.messages import Abreast, Agreed, Done, Ended, Lacking, Meet, Met, Part, Sealed, Word
from paceline.servers.peers import ServedPeers, stretch
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, SharesWanted, TermEnded
from paceline.tensors.tree import Plan

if TYPE_CHECKING:
    from paceline.strategies.base import Seat

_FIRST = 0
"""The fragment with which everything else lies."""


@dataclass
class Hand:
    """What a worker has in hand for one point, whoever its peers are."""

    leaves: int
    patience: float
    """Who has waited so many seconds computes what is missing."""
    rows: dict[int, bytes] = field(default_factory=dict)
    """The lanes of each share that it has computed, in the order of its memory for their parts."""
    word: Word | None = None
    sent: set[int] = field(default_factory=set)
    spoken: bool = False
    moves: int = 0
    """How often something had moved when these were sent."""
    needed: set[int] = field(default_factory=set)
    """Shares that are missing somewhere, whatever was known before."""
    unanswered: list[Future[Reply]] = field(default_factory=list)
    met: Met | None = None
    """What the point has come to, once its sum is known to be complete: no share is needed any more."""

    def say_again(self) -> None:
        """Something has moved."""
        self.sent, self.spoken, self.unanswered = set(), False, []


class SharewisePeers(ServedPeers):
    """`rank` is the share in hand: each share is a worker of its own to the `Reducer`."""

    def __init__(self, *arguments: Any, seat: Seat) -> None:
        super().__init__(*arguments)
        self.own_rank, self._seat = self.rank, seat
        self._hand = Hand(0, patience=0.0)

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._take_memory(plan, layout)

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        return self._fetched(call, divisor)

    def take_up(self, hand: Hand) -> None:
        """A point begins, or goes on in another term."""
        self._hand = hand

    def look(self) -> bool:
        """Whether the point is met already. By the line on which nothing ever waits."""

        def attempt() -> Met:
            met: Met = self._holders.wait([self._holders.out([_FIRST], self._asking(wait=False))])[0].message
            return met

        met = self._holders.through(attempt)
        self._hand.met = met if met.agreed else None
        return bool(met.agreed)

    def _asking(self, wait: bool) -> Meet:
        return Meet(*self.at, self._hand.leaves, self._seat.view().term, wait)

    def parts(self) -> Parts:
        """Memory for the share in hand."""
        return [self._sums.parts.of(len(self._hand.rows))]

    def keep(self, leaf: int, row: Lanes) -> None:
        """The share in hand is computed."""
        self._hand.rows[leaf] = row.tobytes()

    def tell_early(self) -> None:
        """Whatever there is to tell, before the meeting; which sees to servers that are lost."""
        with suppress(MovedError):
            self._tell()

    def _tell(self) -> None:
        """First the word: so it is known when the sum is complete."""
        hand = self._hand
        if (
            hand.moves != self._holders.moves
        ):  # parts of sums that were not complete have not moved with their fragments
            hand.say_again()
            hand.moves = self._holders.moves
        if hand.word is not None and not hand.spoken:
            hand.unanswered.append(self._holders.out([_FIRST], hand.word))
            hand.spoken = True
        due = hand.rows if hand.met is None else hand.rows.keys() & hand.needed
        self._send(leaf for leaf in due if leaf not in hand.sent)

    def _send(self, leaves: Iterable[int]) -> None:
        hand, (step, call), fragments = self._hand, self.at, self._fragments()
        batches = sorted(self._holders.batches(range(len(fragments))), key=lambda batch: _FIRST in batch)
        for leaf in list(leaves):
            flats = self._sums.parts.of(list(hand.rows).index(leaf))
            calls: list[Future[Reply]] = []
            for batch in batches:
                if batch is batches[-1]:
                    self._holders.wait(calls)
                row = hand.rows[leaf] if _FIRST in batch else b""
                message = Part(step, call, hand.leaves, leaf, leaf + 1, batch, row)
                calls.append(self._holders.out(batch, message, *(stretch(flats, fragments[k]) for k in batch)))
            hand.unanswered.append(calls[-1])
            hand.sent.add(leaf)

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        """The rows of the shares, in their order. `agreed` has the words, and `steps` says to which one each worker had come
        when this one came."""
        first = True

        def attempt() -> Agreed:
            nonlocal first
            again, first = not first, False
            return self._meet(again)

        self.agreed = self._holders.through(attempt)
        rows = np.stack([np.frombuffer(row, dtype=np.int64) for row in self.agreed.rows])
        if rows[:, 1].any():
            raise UsageError(
                "a sparse gradient with --strategy ps+backup: its rows go from worker to worker, and nobody waits for a slow "
                "one here; use sparse=False, or --strategy ps"
            )
        return rows

    def _meet(self, again: bool) -> Agreed:
        hand = self._hand
        if again:
            hand.say_again()
        self._tell()
        asked = self._holders.back([_FIRST], self._asking(wait=True))
        sums = [self._holders.back(mine, Sealed(*self.at, mine, wait=True)) for mine in self._holders.of_each()]
        met: Met = self._holders.wait([asked, *hand.unanswered], self._while_open)[0].message
        hand.unanswered = []
        if not met.agreed:
            raise TermEnded(f"the term is over at step {self.at[0]}")
        self._holders.wait(sums, self._while_sealed)
        self._await_the_last(met.steps)
        self.steps = met.steps
        return msgspec.msgpack.decode(met.agreed, type=Agreed)

    def _while_open(self, seconds: float) -> None:
        try:
            self._check(seconds)
        except TermEnded:
            ended = Ended(*self.at, self._hand.leaves, self._seat.view().term, [_FIRST])
            (answer,) = self._holders.wait([self._holders.out([_FIRST], ended)])
            if answer.message == Done(True):
                raise
        self._help(seconds)

    def _while_sealed(self, seconds: float) -> None:
        self._seat.check()
        self._help(seconds)

    def _help(self, seconds: float) -> None:
        """After a long wait: a worker may be stuck, or a server is lost and with it a part whose sender is dead."""
        hand = self._hand
        if seconds < hand.patience:
            return
        asked = [self._holders.out(mine, Lacking(*self.at, hand.leaves, mine)) for mine in self._holders.of_each()]
        missing = sorted({leaf for answer in self._holders.wait(asked) for leaf in answer.message.leaves})
        self._send(leaf for leaf in missing if leaf in hand.rows)
        wanted = [leaf for leaf in missing if leaf not in hand.rows]
        if wanted:
            hand.needed.update(wanted)
            raise SharesWanted(wanted)

    def _await_the_last(self, steps: dict[int, int]) -> None:
        """Nobody gets further ahead than servers remember."""
        least, seat = self.at[0] - BEHIND, self._seat
        while True:
            there = set(seat.view().members) - {seat.worker, *seat.lost()}
            last = [worker for worker in there if steps.get(worker, -1) < least]
            if not last:
                return
            abreast = self._holders.back([_FIRST], Abreast(least, last))
            (answer,) = self._holders.wait([abreast], lambda seconds: seat.check())
            if answer.message == Done(True):
                return
