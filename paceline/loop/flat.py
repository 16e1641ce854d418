"""Loops without run.slots(): each worker has one slot, and a backward is a reduce point.

A worker that is lost in a step leaves its share uncomputed, and nobody else's script can be made to compute
a second one. So the others wait where they are, let a newcomer in with the state the step began with, and
it computes the missing share; theirs stand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.order import mix
from paceline.data.random import IN_SHARE, set_seed
from paceline.errors import UsageError
from paceline.strategies.base import Point, Stepwise
from paceline.tensors.peers import TermEnded
from paceline.tensors.tree import Plan
from paceline.worker.session import Session, user_line

if TYPE_CHECKING:
    from paceline.loop.steps import Stepper

Deal = Mapping[int, int]
"""Which slot each worker has."""


def dealt_anew(deal: Deal, members: Sequence[int], slots: int) -> Deal:
    """Who is still there keeps its slot; a newcomer takes the first that is free.

    >>> dealt_anew({0: 0, 1: 1, 2: 2}, (0, 2, 3), 3)
    {0: 0, 2: 2, 3: 1}
    """
    kept = {deal[member] for member in members if member in deal}
    free = iter(slot for slot in range(slots) if slot not in kept)
    return {member: deal[member] if member in deal else next(free) for member in members}


class Flat:
    """The flat side of a stepper."""

    def __init__(self, stepper: Stepper, session: Session, strategy: Stepwise | None) -> None:
        """Without a strategy workers do not meet in a step, and any loop will do."""
        self._stepper, self._session = stepper, session
        if strategy is not None:
            self._strategy = strategy
            strategy.on_flat_backward(self._begins, self._ends)
        self.allowed = False
        """Whether each worker has one slot."""
        self.known = False
        """The script has trained a step without run.slots()."""
        self._backwards = 0
        """In one step, at most."""
        self._unseeded = False
        self._deal: Deal | None = None
        """In a step that has lost a worker; otherwise slots go by rank."""
        self._point: Point | None = None
        self._term: int | None = None
        """In which the point is open."""
        self._ended: TermEnded | None = None
        """The term ended at the opening: the point is opened when the backward is over, with those who are there then."""
        self.refill: Callable[[], None]
        """Let newcomers in, here and now, until every slot has a worker."""
        self.arrive: Callable[[], None] = lambda: None
        """If this worker's term is over, enter the next one, before a step is begun by the slots of the old one."""

    @property
    def recovers(self) -> bool:
        """Whether the others can go on if this worker is lost now: where each has one share, not everywhere."""
        return not self.known or self._backwards < 2

    @property
    def plan(self) -> Plan:
        """Who has which slots now."""
        stepper, deal = self._stepper, self._deal
        if deal is None:
            return Plan.of(stepper.slots, stepper.workers)
        return Plan(stepper.slots, tuple(((deal[m], deal[m] + 1),) for m in self._session.view.members))

    def meet(self) -> None:
        """The view is another one."""
        self.allowed = self._stepper.slots == self._stepper.workers and not self._stepper.follows
        if self._deal is not None:
            self._deal = dealt_anew(self._deal, self._session.view.members, self._stepper.slots)

    # a newcomer gets

    def capture(self) -> tuple[bool, list[tuple[int, int]]]:
        return self.known, list((self._deal or {}).items())

    def restore(self, state: tuple[bool, list[tuple[int, int]]]) -> None:
        self.known, deal = state
        self._deal = dict(deal) or None
        self._stepper.deal_slots()

    # steps

    def fill(self) -> None:
        """Before a step: a script that is known to be flat needs a worker for each slot."""
        self.arrive()
        if (self.known or self._deal is not None) and not self.allowed:
            self.refill()

    def begin(self) -> bool:
        """A step begins; whether its share begins with it. If not, it does with the first forward."""
        self._point, self._unseeded = None, False
        if not self.allowed:
            return False
        self._strategy.weigh(self._weight())
        self._unseeded = self._stepper.workers > 1
        if self._unseeded and self.known:
            self._seed()
            return True
        return False

    def begin_late(self) -> bool:
        """The step has begun with too few workers, and the script turns out to be flat: wait for the others,
        if they will come."""
        if not self._stepper.active or self._session.board.reach_with_room < self._stepper.slots:
            return False
        self.refill()
        self._strategy.begin_step()  # one that was alone had nothing to remember
        self.begin()
        return True

    def end(self) -> None:
        """A step is over: slots go by rank again."""
        self._backwards = max(self._backwards, self._stepper.call)
        if self._deal is not None:
            self._deal = None
            self._stepper.deal_slots()

    def _weight(self) -> float:
        batch, slot = self._stepper.batch, self._stepper.mine[0]
        if batch is None:
            return 1.0
        share = batch.share(slot)
        return 0.0 if share is None else batch.weight(slot, share.value)

    def before_forward(self, module: Any, arguments: Any) -> None:
        """A share begins with the first forward: from here on draws differ by slot.

        Once a script is known to be flat, a share begins with its step.
        """
        if self._unseeded and self._stepper.active and not self._stepper.inside and torch.is_grad_enabled():
            self._seed()

    def _seed(self) -> None:
        self._unseeded = False
        stepper = self._stepper
        set_seed(mix(self._session.settings.seed, IN_SHARE, stepper.step, 0, stepper.mine[0]), stepper.device)

    # the reduce point

    def _begins(self) -> bool:
        """A backward has started outside run.slots(): is it this step's?"""
        stepper = self._stepper
        if not (stepper.active and self.allowed) or stepper.inside or self._point is not None:
            return False
        if stepper.summed and stepper.workers > 1:
            raise UsageError(
                f'{user_line()}: loss="sum" needs the inner loop: add `for x, y in run.slots():` around forward and backward'
            )
        self._point, self._term, self._ended = Point(stepper.step, stepper.call, stepper.slots), None, None
        self._session.at = self._point.words
        try:
            self._open(self._point)
        except TermEnded as ended:
            self._ended = ended
        return True

    def _open(self, point: Point) -> None:
        """With the workers of this term, if that is not done; what was folded in an earlier one stands."""
        term = self._session.view.term
        if self._term is None:
            self._strategy.open(point, self.plan, flat=True)
        elif self._term != term:
            self._strategy.carry_on(point, self.plan, kept=1)
        self._term = term

    def _ends(self) -> None:
        """That backward is over."""
        stepper, point = self._stepper, self._point
        assert point is not None
        slot = stepper.mine[0]
        stepper.take(slot)
        folded = False
        if self._ended is not None:
            self._wait_for_newcomers(self._ended)
        while True:
            try:
                self._open(point)
                if not folded:
                    start = time.perf_counter()
                    self._strategy.fold(slot)
                    folded = True
                    stepper.split.communication += time.perf_counter() - start
                stepper.commit(point)
                self._point, self.known = None, True
                return
            except TermEnded as ended:
                self._wait_for_newcomers(ended)

    def _wait_for_newcomers(self, ended: TermEnded) -> None:
        """A worker is gone in the middle of a step: until every slot has one again."""
        if self._stepper.call:
            raise UsageError(
                f"{ended}, in the second backward of a flat loop's step: what the step began with is gone, and nobody else "
                "can compute its share. Add the inner loop `for x, y in run.slots():` around each forward and backward, "
                "or go on from a checkpoint (`paceline resume`)"
            )
        if self._deal is None:
            self._deal = {member: rank for rank, member in enumerate(self._session.view.members)}
        with self._strategy.as_begun():
            self._stepper.next_term()
            self.refill()
