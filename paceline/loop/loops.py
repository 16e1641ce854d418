"""Training loops of strategies whose workers do not meet in every step; the others' is in `feeding` and `steps`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.data.loader import Feed
    from paceline.loop.steps import Stepper
    from paceline.run import Run
    from paceline.strategies.base import Strategy


class Loop(Protocol):
    @property
    def copied_bytes(self) -> int:
        """What this worker has sent so far that only a loss is survived by: states, to other machines."""

    def begin(self) -> None:
        """Before the script's first loop, by those who are there from the beginning, or go on from a checkpoint."""

    def enter(self) -> None:
        """The same for a newcomer, which gets its state."""

    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        """What `for batch in loader` runs; behind it everybody's weights are the same."""

    def over_steps(self, count: int) -> Iterator[int]:
        """The same for run.steps()."""

    def come_together(self) -> None:
        """All workers are about to meet, with the same weights: whatever the script has left in the middle is ended."""

    def collect(self) -> None:
        """Main's, at the end of the run: receipts that nobody has written."""

    def close(self) -> None:
        """The run is over."""


def loop_of(run: Run, strategy: Strategy, stepper: Stepper) -> Loop:
    from paceline.loop.client_turns import ClientTurns
    from paceline.loop.rounds import Rounds
    from paceline.loop.turns import FreeTurns
    from paceline.strategies.averaging import Averaging
    from paceline.strategies.federated import Federated
    from paceline.strategies.free import FreeRunning

    if isinstance(strategy, FreeRunning):
        return FreeTurns(run, strategy, stepper)
    if isinstance(strategy, Federated):
        return ClientTurns(run, strategy, stepper)
    assert isinstance(strategy, Averaging)
    return Rounds(run, strategy, stepper)
