"""Verdicts on runs that never ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.faults.judge import HEAD, Outcome, judge, row, stall, total
from paceline.faults.plan import Fault

REFERENCE: dict[str, Any] = {"weights_sha256": "ab" * 32, "samples": 400, "steps": 40, "exit": "finished"}
FINE = Outcome(0, REFERENCE | {"shares_redone": 3}, 7.0, told=["kill worker:1 @step 3"], step_times=[1, 2, 3, 7, 8])
PLAN = [Fault.parse("kill worker:1 @step 3"), Fault.parse("kill worker:1 @step 5")]


def violations(outcome: Outcome, *plan: str) -> tuple[str, ...]:
    return judge(REFERENCE, outcome, 1, [Fault.parse(text) for text in plan]).violations


def test_a_run_like_the_reference_is_fine() -> None:
    told = [*FINE.told, "kill worker:1 @step 5: passed over, worker 1 is gone"]
    verdict = judge(REFERENCE, replace(FINE, told=told), 7, PLAN)
    assert verdict.violations == ()
    assert dict(zip(HEAD, row(verdict), strict=True)) == {
        "seed": "7",
        "hash": "abababababab",
        "samples": "400",
        "stall": "3.00 s",
        "redone": "3",
        "faults": "1/2 (1 passed over)",
        "why": "as the reference",
    }
    assert total([verdict]) == "1 plans, no violation, 1 of 2 faults carried out; stall median 3.00 s, worst 3.00 s"


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (replace(FINE, summary=REFERENCE | {"weights_sha256": "cd" * 32}), "weights_sha256 cdcdcdcdcdcd, not abababababab"),
        (replace(FINE, summary=REFERENCE | {"samples": 401}), "samples 401, not 400"),
        (replace(FINE, summary=REFERENCE | {"steps": 39}), "steps 39, not 40"),
        (replace(FINE, summary=REFERENCE | {"exit": "stopped"}), "exit stopped, not finished"),
        (replace(FINE, summary={}), "no summary"),
        (replace(FINE, code=1, last_words="worker 1 fell"), "exit code 1 (worker 1 fell)"),
        (replace(FINE, code=-9), "exit code -9"),
        (replace(FINE, late=True, summary={}), "it hung: ended after 7 s"),
        (replace(FINE, left=["12 python x.py"]), "left behind: 12 python x.py"),
        (replace(FINE, unlike="step 3 differs"), "verify: step 3 differs"),
    ],
)  # fmt: skip
def test_each_violation_by_its_name(outcome: Outcome, says: str) -> None:
    assert violations(outcome, "kill worker:1 @step 3") == (says,)
    verdict = judge(REFERENCE, outcome, 1, PLAN)
    assert row(verdict)[-1] == f"VIOLATION: {says}" and "1 violation," in total([verdict])


def test_the_stall_as_the_run_tells_it_or_as_its_steps_do() -> None:
    assert stall({"longest_gap_s": 0.75, "median_step_s": 0.25}, [0, 9]) == 0.5
    assert stall({}, [0, 1, 2, 5]) == 2
    assert stall({}, [3]) is None
