"""What step() of a prepared scheduler does while a replica trains another one's share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.errors import UsageError
from paceline.loop.schedules import OwnSchedule, RoundSchedule, Schedule, held

MADE: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
    "in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_scheduler_that_is_held_counts_nothing_and_goes_on_as_if_nothing_had_been(kind: str) -> None:
    def learned(extra: int) -> tuple[list[float], dict[str, Any]]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        scheduler = MADE[kind](optimizer)
        schedule = OwnSchedule(scheduler)
        arguments = (1.0,) if kind == "plateau" else ()
        rates = []
        for _ in range(5):
            with held([schedule]):
                for _ in range(extra):
                    optimizer.step()
                    scheduler.step(*arguments)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if len(rates) < 5:
                scheduler.step(*arguments)
        state = {name: value for name, value in scheduler.state_dict().items() if name != "_schedulers"}
        return rates, copy.deepcopy(state)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the order of the two step()s, say
        assert learned(extra=3) == learned(extra=0)


def test_one_that_is_let_go_by_an_exception_goes_on() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    schedule = OwnSchedule(scheduler)
    with pytest.raises(KeyError), held([schedule]):
        raise KeyError
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def of(kind: Callable[[Any], Any]) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = kind(optimizer)
    optimizer.step()
    return optimizer, scheduler


def test_a_chain_of_schedulers_follows_the_run_s_steps() -> None:
    optimizer, chain = of(
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.5)]
        )
    )
    schedule = Schedule(chain)
    schedule.at(2)
    chain.step()  # this worker has the third step in hand, and others had those before
    assert optimizer.param_groups[0]["lr"] == 0.25**3
    schedule.rest(5)
    assert optimizer.param_groups[0]["lr"] == 0.25**5


def test_one_that_wants_a_value_is_not_stepped_within_a_client() -> None:
    _, plateau = of(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1))
    schedule = RoundSchedule(plateau)
    schedule.at(0)
    with pytest.raises(UsageError, match="step it behind the loop"):
        plateau.step(1.0)
    schedule.rest(1)
    plateau.step(1.0)
    assert plateau.last_epoch == 1


def test_one_that_does_not_count_is_refused_when_it_would_have_to_follow() -> None:
    class Bare(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, epoch: Any = None) -> None:
            pass

    _, bare = of(Bare)
    schedule = Schedule(bare)
    schedule.at(0)
    with pytest.raises(UsageError, match="does not say how often it was stepped"):
        bare.step()
