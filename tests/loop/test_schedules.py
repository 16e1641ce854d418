"""What step() of a prepared scheduler does while a replica trains another one's share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.loop.schedules import OwnSchedule, held

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
