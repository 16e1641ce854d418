"""What `benchmarks.served_bits` and `benchmarks.failovers` do in full, for one seed and in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.failovers import LIMIT_S, fail_over
from benchmarks.served_bits import Case, compared, reference
from tests.end_to_end.launching import environment


@pytest.fixture(autouse=True)
def as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks start runs by themselves."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for campaign in ("served_bits", "failovers"):
        monkeypatch.setattr(f"benchmarks.{campaign}.STEPS", 60)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_servers_give_the_bits_of_all_reduce_with_a_worker_and_a_server_killed(optimizer: str, seed: int) -> None:
    """At two servers others have a copy; at one the run goes back to a checkpoint."""
    case = Case(optimizer, workers=2, servers=1 if optimizer == "sgd" else 2)
    told: list[str] = []
    assert compared(case, reference(optimizer), range(seed, seed + 1), told.append), told


def test_a_killed_primary_holds_nobody_up_for_long(tmp_path: Path, seed: int) -> None:
    it = fail_over(tmp_path, seed, workers=2, servers=2)
    print(it)
    assert it.weights == reference("adamw") and it.promoted_s <= it.gap_s < LIMIT_S and it.leads
