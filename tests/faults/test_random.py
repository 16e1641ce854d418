"""Random plans: the same for a seed, of all kinds and roles, and bearable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.faults.plan import HITS, KINDS, ROLES, Fault
from paceline.faults.random import Range, kills_everything, random_plan

RANGES = st.builds(
    Range, st.integers(1, 5000), st.floats(0.5, 500), st.integers(2, 9), st.integers(0, 4), st.integers(1, 3)
)


@given(st.integers(0, 1 << 40), RANGES, st.integers(1, 8))
def test_a_plan_can_be_drawn_again_typed_and_borne(seed: int, within: Range, most: int) -> None:
    plan = random_plan(seed, within, most=most)
    assert plan == random_plan(seed, within, most=most)
    assert 1 <= len(plan) <= most
    assert [Fault.parse(str(fault)) for fault in plan] == plan, "what is printed can be given to --fault"
    assert all((fault.step or 0) < within.steps for fault in plan)
    there = {"worker": within.workers, "server": within.servers}
    assert all(fault.number is None or fault.number < there[fault.role] for fault in plan)
    taken = [fault for fault in plan if fault.role in ("worker", "main") and fault.kind != "slow"]
    assert len(taken) < within.workers, "somebody is left"
    assert sum(fault.role in ("coordinator", "standby") for fault in plan) <= 1
    assert sum(fault.role == "server" for fault in plan) <= min(1, within.servers // 2, within.replicas // 2)
    assert not any(map(kills_everything, plan[:-1]))


def test_200_plans_have_all_kinds_and_roles() -> None:
    drawn = {
        (fault.kind, fault.role) for seed in range(1, 201) for fault in random_plan(seed, Range(800, 6.0, 4, 2, 2))
    }
    assert drawn == {(kind, role) for kind in KINDS for role in HITS[kind]}


def test_servers_that_cannot_be_lost_change_no_plan() -> None:
    for seed in range(1, 51):
        without = random_plan(seed, Range(800, 6.0, 4))
        assert without == random_plan(seed, Range(800, 6.0, 4, 1, 2)) == random_plan(seed, Range(800, 6.0, 4, 3, 1))


@given(st.integers(0, 10_000), st.sets(st.sampled_from(KINDS), min_size=1), st.sets(st.sampled_from(ROLES), min_size=1))
def test_only_what_was_asked_for(seed: int, kinds: set[str], roles: set[str]) -> None:
    plan = random_plan(seed, Range(800, 6.0, 4, 2, 2), kinds, roles)  # type: ignore[arg-type]
    assert all(fault.kind in kinds and fault.role in roles for fault in plan)
