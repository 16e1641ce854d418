"""Synchronous parameter servers that do not wait for a slow worker: `ps+backup:k`.

A worker that is done computes also the shares of slots that are expected last, at most k of them; whichever copy comes first
counts. All copies are the same bits, so the weights are those of `ps`. Who finds that a step was completed without it
drops what it has, takes over what came of that step and the following ones, and computes again when it is level.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.clocks import Backup, doubled, parse
from paceline.servers.messages import Word
from paceline.servers.sharewise import Hand, SharewisePeers
from paceline.state.replica import Replica
from paceline.strategies.allreduce import LANES
from paceline.strategies.base import DIGEST, STOP, TALLY, TERM, Point, Scaled
from paceline.strategies.ps import ParameterServers
from paceline.tensors.peers import Peers, SharesWanted
from paceline.tensors.tree import Plan

_SMOOTH = 0.5
"""The weight of the last share in a worker's pace."""
_PATIENCE_S = 1.0
_PATIENT_SHARES = 4
"""Who has waited for the time of so many shares, and for no less than a second, computes what is missing."""


class Backups(ParameterServers):
    may_lag = True

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.mode, self._backup = text, parse(text)
        self._seconds: dict[int, float] = {}
        """What each worker lately needed for a share, as all know it."""
        self._own_s = 0.0
        self._shown = self._late = False
        """Whether the script has seen a share; whether the last point was met before this worker had computed its own."""
        self._stepped = -1

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        if len(replica.optimizers) > 1:
            raise UsageError(f"--strategy {self.mode} takes one optimizer, and there are several; use --strategy ps")
        super().attach(replica, peers, mean, scaled)

    def _group(self, *arguments: Any) -> SharewisePeers:
        self._shares = SharewisePeers(*arguments, seat=self._seat)
        return self._shares

    # a point

    def open(self, point: Point, plan: Plan, flat: bool) -> None:
        if flat or point.call:
            what = "a loop without run.slots()" if flat else "a second reduce point in a step"
            raise UsageError(
                f"{what} with --strategy {self.mode}, where a share may be computed by any worker, once; "
                f"{'add the inner loop' if flat else 'have one loop over run.slots() a step'}, or use --strategy ps"
            )
        mine = plan.leaves_of(self._shares.own_rank)
        self._shares.at = (point.step, point.call)
        patience = max(_PATIENCE_S, _PATIENT_SHARES * self._own_s)
        self._hand = Hand(plan.leaves, patience)
        self._shares.take_up(self._hand)
        self._shares.rank = plan.leaves  # none yet
        self._singles = _singles(plan.leaves)
        super().open(point, self._singles, flat)
        self._last_leaf = mine[-1] if mine else -1
        twice = self._doubled(plan)
        self._extra = list(twice.get(self._seat.worker, ()))
        self._expected_late = any(leaf in mine for extra in twice.values() for leaf in extra)

    def _doubled(self, plan: Plan) -> dict[int, tuple[int, ...]]:
        """The shares that each worker computes too."""
        members = self._seat.view().members
        assert isinstance(self._backup, Backup)
        if any(member not in self._seconds for member in members):
            return {}
        slots = {member: plan.leaves_of(rank) for rank, member in enumerate(members)}
        return doubled(self._backup, {member: self._seconds[member] for member in members}, slots)

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        self._extra, self._late = [], True
        self._shares.take_up(self._hand)
        return [leaf for leaf in plan.leaves_of(self._shares.own_rank) if leaf not in self._hand.rows]

    def begin_share(self, leaf: int) -> bool:
        if self._shown and (leaf in self._hand.rows or self._is_over(leaf)):
            return False
        self._shares.rank = leaf
        self._reducer.open(self._singles, LANES)
        if self._overlap is not None:
            self._overlap.open(self._call)
        self._begun = time.monotonic()
        return True

    def _is_over(self, leaf: int) -> bool:
        """Whether the point is met already; asked where that may well be."""
        if leaf in self._hand.needed:
            return False
        if self._hand.met is not None:
            return True
        likely = self._late or (bool(self._hand.rows) and leaf not in self._extra)
        return likely and self._shares.look()

    def fold(self, leaf: int) -> None:
        ran = bool(self._weight)
        super().fold(leaf)
        lanes = [0] * TALLY.stop
        lanes[TALLY] = self._seat.tally(leaf)
        self._shares.keep(leaf, self._reducer.row(lanes))
        if ran:
            self._shown, took = True, time.monotonic() - self._begun
            self._own_s = (1 - _SMOOTH) * self._own_s + _SMOOTH * took if self._own_s else took
        if leaf != self._last_leaf:
            self._shares.tell_early()

    def commit(self, point: Point, key: int, lanes: Sequence[int]) -> NDArray[np.int64]:
        hand = self._hand
        if hand.word is None:
            self._late = hand.met is not None or (self._expected_late and self._shares.look())
            said = list(map(int, lanes[: TALLY.start]))
            hand.word = Word(point.step, self._seat.worker, self._own_s, said, [0])
        extra = [leaf for leaf in self._extra if leaf not in hand.rows]
        if extra and hand.met is None:
            self._shares.tell_early()
            raise SharesWanted(extra)
        shares = super().commit(point, key, lanes)
        self._late |= max(self._shares.steps.values()) > point.step
        return self._everybodys(point.step, lanes, shares)

    def _everybodys(self, step: int, lanes: Sequence[int], shares: NDArray[np.int64]) -> NDArray[np.int64]:
        """One row a worker, of its last word; with the first one's what all shares have taken."""
        view, words = self._seat.view(), self._shares.agreed.words
        self._seconds = {worker: word.seconds for worker, word in words.items() if word.seconds}
        rows = np.zeros((len(view.members), len(lanes)), dtype=np.int64)
        rows[:, DIGEST] = lanes[DIGEST]  # settings change from step to step: only words of this one are compared
        for row, member in zip(rows, view.members, strict=True):
            word = words.get(member)
            if word is not None:
                row[STOP], row[TERM] = word.lanes[STOP], word.lanes[TERM]
                if word.step == step:
                    row[DIGEST] = word.lanes[DIGEST]
        rows[0, TALLY] = shares[:, TALLY].sum(axis=0)
        return rows

    # the optimizer

    def _before_step(self, number: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._shares.at[0]
        if step == self._stepped:
            raise UsageError(
                f"two optimizer steps in one step of the run with --strategy {self.mode}, whose servers remember one for each; "
                "use --strategy ps"
            )
        self._stepped = step
        super()._before_step(number, optimizer, args, kwargs)

    def _send(self, everything: bool) -> list[Future[Reply]]:
        """What the script has changed comes from all: nobody waits for one worker's."""
        return super()._send(everything=True)


def _singles(leaves: int) -> Plan:
    """Each share is a part of its own, as if of a worker of its own; and behind them one that has none."""
    return Plan(leaves, (*(((leaf, leaf + 1),) for leaf in range(leaves)), ()))
