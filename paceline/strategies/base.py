"""The protocol that every strategy follows, and what those add to it whose workers meet in every step, or at servers.

A stepwise strategy is driven like this, at each reduce point:

    strategy.open(point, plan, flat)  the shares of this point will follow
    strategy.weigh(weight)            what the coming share counts for
    …the script's forward and backward…
    strategy.fold(leaf)               that share is done
    strategy.commit(point, key, lanes)  meet the others: `.grad` is the whole batch's on return

Where workers do not meet in every step, a loop of the strategy's own drives it: see `paceline.loop.loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.data.loader import Feed
from paceline.data.receipts import Tally
from paceline.servers.holders import Directory
from paceline.servers.register import Register
from paceline.state.replica import Replica
from paceline.tensors.codecs.kept import Allocate
from paceline.tensors.peers import Peers, Watch
from paceline.tensors.tree import Plan
from paceline.wires.view import View

STOP, DIGEST, TERM = range(3)
TALLY = slice(3, 6)
"""Lanes of a reduce point: an asked-for stop, a digest of settings, the newest term known, what was delivered."""


@dataclass(frozen=True)
class Point:
    """A reduce point: the call-th of a step, over so many shares."""

    step: int
    call: int
    leaves: int

    @property
    def words(self) -> str:
        again = f", reduce point {self.call + 1}" if self.call else ""
        return f"the gradients of step {self.step}{again}"


class Scaled(Protocol):
    scale: float


@dataclass(frozen=True)
class Seat:
    """Who this worker is, for a strategy that meets others elsewhere than in its group."""

    worker: int
    slots: int
    lost: Callable[[], list[int]]
    """The workers that are dead and reaped."""
    check: Callable[[], None]
    """Raises if waiting is in vain."""
    view: Callable[[], View]
    """Of the term it is in."""
    tally: Callable[[int], Tally]
    """What it has taken for a share of the point in hand."""


class Strategy(Protocol):
    same_bits: bool
    """Whether all workers have the same weights at the end, bit for bit."""

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        """Once, when all models are known. `scaled`: gradients come multiplied by its scale."""

    def meet(self, peers: Peers) -> None:
        """From now on these are the workers; between two points, or before `carry_on`."""

    def capture(self) -> dict[str, Any]:
        """What a newcomer must know beside the replica, as plain values and tensors."""

    def restore(self, state: dict[str, Any]) -> None: ...
    def whole(self) -> AbstractContextManager[Register | None]:
        """Inside, all of the run's state is in the replica, wherever it is kept: for a checkpoint, by main, between steps.
        Where workers run at their own pace, there is a register of it."""

    def wire_bytes(self) -> int:
        """What this worker has sent so far, to workers or to servers."""

    def report(self) -> dict[str, Any]:
        """What the summary should say of it."""

    def close(self) -> None: ...


@runtime_checkable
class Served(Strategy, Protocol):
    """Workers meet at servers. `reach` comes before `attach`, main calls `lay` before the first step, and all `begin` behind
    that."""

    waits: dict[int, float]
    """Seconds that this worker has waited at servers, by the worker for whom."""

    def reach(self, servers: Directory, watch: Watch, seat: Seat) -> None: ...
    def lay(self) -> None: ...
    def begin(self) -> None: ...


@runtime_checkable
class InRounds(Strategy, Protocol):
    """Clients train, each on its own of a loader's samples, and one round is one pass of the script's loop over epochs."""

    rounds: int
    """How many; 0: as many as the script says."""

    def feed(self, loader: Any, seed: int) -> Feed:
        """What a prepared loader gives."""


@runtime_checkable
class Stepwise(Strategy, Protocol):
    """Workers meet at reduce points, in every step."""

    may_lag: bool
    """Whether a worker may be some steps behind the others."""

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        """`commit` ended with the term. The shares that this worker has to fold before it commits again:
        its first `kept` parts stand."""

    def begin_step(self) -> None:
        """A step starts, before its first forward."""

    def open(self, point: Point, plan: Plan, flat: bool) -> None:
        """A reduce point starts; flat: inside the script's backward, where there is no run.slots()."""

    def as_begun(self) -> AbstractContextManager[None]:
        """Inside, the models' tensors are what they were when the step began: what a newcomer needs to compute a
        share of it. Only in a flat loop, before the step's first point is met."""

    def begin_share(self, leaf: int) -> bool:
        """A share comes next. False: nobody needs it any more."""

    def weigh(self, weight: float) -> None: ...
    def fold(self, leaf: int) -> None: ...
    def drop(self) -> None:
        """Instead: that share counts for nothing, and all is as it was before it."""

    def commit(self, point: Point, key: int, lanes: Sequence[int]) -> NDArray[np.int64]:
        """Everybody's lanes, one row a worker. `SharesWanted`: there is more to compute first."""

    def on_flat_backward(self, begin: Callable[[], bool], finish: Callable[[], None]) -> None:
        """For loops without run.slots(): `begin` says whether the backward that has just started
        belongs to a step; if so, `finish` is called when it is over."""


@runtime_checkable
class Lasting(Strategy, Protocol):
    """Something that belongs to the run is kept from step to step, and is not the same for all workers."""

    @property
    def scattered(self) -> bool:
        """Whether it lies with each worker alone. Then all `collect` before a checkpoint, and before the members change."""

    def keep_in(self, allocate: Allocate | None, go_back: Callable[[str], NoReturn]) -> None:
        """Before `attach`: memory that outlives a worker and is the same for all; None where there is none. `go_back` says why
        the run cannot go on where it is, and does not return: all begin again at the newest checkpoint."""

    def collect(self, gather: Callable[[Callable[[], bytes]], list[bytes]]) -> None:
        """Between two steps: everybody gets everybody's. Nothing is done where all have it already."""
