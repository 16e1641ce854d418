"""Prepared schedulers where a worker's loop body does not run once for each step of the run: what their step() does there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class Steered(ABC):
    """A scheduler whose step(), as the script calls it, is a loop's to decide on."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler, self._advance = scheduler, scheduler.step
        # By its class: what is on the object itself would be part of its state.
        kind = type(scheduler)
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": lambda _, *args, **kw: self._stepped(*args, **kw)})

    @abstractmethod
    def _stepped(self, *args: Any, **kwargs: Any) -> None:
        """The script has called it."""


class Schedule(Steered):
    """A scheduler that the script steps within its loop follows the run's steps, of which this worker does a part.

    One that is stepped between stretches, once an epoch say, is left alone.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler)
        self._step, self.within = -1, False

    def at(self, step: int) -> None:
        """The micro-batch in hand belongs to this step of the run."""
        self._step = step
        if self.within:
            self._up_to(step)

    def rest(self, steps: int) -> None:
        """A stretch is over, and the run has come so far."""
        self.at(steps)
        self._step = -1

    def _stepped(self, *args: Any, **kwargs: Any) -> None:
        if self._step < 0 or args or kwargs:
            self._advance(*args, **kwargs)
            return
        self.within = True
        self._up_to(self._step + 1)

    def _up_to(self, count: int) -> None:
        while self._scheduler.last_epoch < count:
            self._advance()


class RoundSchedule(Schedule):
    """A scheduler that the script steps within its loop goes on by one each round, when that is over: within a round all
    clients train with the same rate, whichever worker has them."""

    def at(self, step: int) -> None:
        self._step = step

    def rest(self, steps: int) -> None:
        self._step = -1
        if self.within:
            self._up_to(steps)

    def _stepped(self, *args: Any, **kwargs: Any) -> None:
        if self._step < 0:
            self._advance(*args, **kwargs)
        self.within |= self._step >= 0


class OwnSchedule(Steered):
    """A scheduler that goes on with the shares of this worker's own replica: while it trains those of another one, in a step
    that its own has had, step() does nothing."""

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler)
        self.held = False

    def _stepped(self, *args: Any, **kwargs: Any) -> None:
        if not self.held:
            self._advance(*args, **kwargs)


@contextmanager
def held(schedules: Iterable[OwnSchedule]) -> Iterator[None]:
    """Inside, none of them goes on."""
    for schedule in schedules:
        schedule.held = True
    try:
        yield
    finally:
        for schedule in schedules:
            schedule.held = False
