"""Prepared schedulers where a worker's loop body does not run once for each step of the run: what their step() does there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import UsageError
from paceline.worker.session import user_line


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
        while _steps_of(self._scheduler) < count:
            self._advance()


def _steps_of(scheduler: LRScheduler) -> int:
    """How often it has been stepped."""
    one: Any = scheduler
    if not hasattr(one, "last_epoch"):  # a ChainedScheduler counts in those it has
        one = next(iter(getattr(one, "_schedulers", [])), None)
    if not hasattr(one, "last_epoch"):
        raise UsageError(
            f"a {type(scheduler).__name__} does not say how often it was stepped, so it cannot follow the run's steps: step it behind the "
            "loop, or leave it out of run.prepare()"
        )
    return int(one.last_epoch)


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
            return
        if args or kwargs:
            raise UsageError(
                f"{user_line()}: {type(self._scheduler).__name__}.step() with a value inside the loop over a client's data: each client has "
                "its own, and all train with one rate; step it behind the loop, with what run.evaluate() gives"
            )
        self.within = True


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
