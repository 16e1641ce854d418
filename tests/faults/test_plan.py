"""Fault plans: what the words mean, and when a fault is due."""

from __future__ import annotations

import pytest

from paceline.cluster.board import Phase, Seen
from paceline.errors import UsageError
from paceline.faults.plan import Fault


def row(worker: int, step: int) -> Seen:
    return Seen(worker, 1, Phase.COMPUTE, 0.0, step, 0, 0, 0, 0.0, "", None)


def test_a_kill_at_a_step_waits_for_its_worker_to_get_there() -> None:
    fault = Fault.parse("kill worker:2 @step 12")
    assert fault.due([row(0, 50), row(2, 11)], 99.0) is None
    assert fault.due([row(0, 50), row(2, 12)], 0.0) == 2
    assert fault.due([row(0, 50), row(1, 50)], 0.0) is None, "it is not there (any more)"


def test_main_is_the_first_of_the_members() -> None:
    fault = Fault.parse("kill main @time 1.5s")
    assert fault.due([row(3, 0), row(1, 0)], 1.4) is None
    assert fault.due([row(3, 0), row(1, 0)], 1.5) == 3


@pytest.mark.parametrize(
    "text", ["", "kill", "kill worker @step 1", "kill worker:1", "freeze worker:1 @step 2", "kill worker:1 @step x"]
)
def test_other_words_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="kill worker:2 @step 120"):
        Fault.parse(text)
