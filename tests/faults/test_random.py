"""Random plans: the same for a seed, of all kinds and roles, and bearable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.faults.plan import HITS, KINDS, ROLES, Fault
from paceline.faults.random import Range, kills_everything, random_plan

RANGES = st.builds(Range, st.integers(1, 5000), st.floats(0.5, 500), st.integers(2, 9))


@given(st.integers(0, 1 << 40), RANGES, st.integers(1, 8))
def test_a_plan_can_be_drawn_again_typed_and_borne(seed: int, within: Range, most: int) -> None:
    plan = random_plan(seed, within, most=most)
    assert plan == random_plan(seed, within, most=most)
    assert 1 <= len(plan) <= most
    assert [Fault.parse(str(fault)) for fault in plan] == plan, "what is printed can be given to --fault"
    assert all((fault.step or 0) < within.steps for fault in plan)
    assert all(fault.worker is None or fault.worker < within.workers for fault in plan)
    taken = [fault for fault in plan if fault.role in ("worker", "main") and fault.kind != "slow"]
    assert len(taken) < within.workers, "somebody is left"
    assert sum(fault.role in ("coordinator", "standby") for fault in plan) <= 1
    assert not any(map(kills_everything, plan[:-1]))


def test_200_plans_have_all_kinds_and_roles() -> None:
    drawn = {(fault.kind, fault.role) for seed in range(1, 201) for fault in random_plan(seed, Range(800, 6.0, 4))}
    assert drawn == {(kind, role) for kind in KINDS for role in HITS[kind]}


@given(st.integers(0, 10_000), st.sets(st.sampled_from(KINDS), min_size=1), st.sets(st.sampled_from(ROLES), min_size=1))
def test_only_what_was_asked_for(seed: int, kinds: set[str], roles: set[str]) -> None:
    plan = random_plan(seed, Range(800, 6.0, 4), kinds, roles)  # type: ignore[arg-type]
    assert all(fault.kind in kinds and fault.role in roles for fault in plan)
