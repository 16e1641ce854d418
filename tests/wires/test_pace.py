"""How far a donor may go ahead of a newcomer: it comes closer, and holds nobody up for long."""

from __future__ import annotations

import pytest

from paceline.wires.pace import NEAR, Pace

MIB = 1 << 20


def begun() -> Pace:
    """The newcomer has taken the state."""
    pace = Pace(MIB)
    pace.taken(0.0)
    return pace


def follow(
    entry_s: float, step_s: float, head_start: int, hiccup: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """A donor that steps every `step_s` if it may, and a newcomer that takes an entry in `entry_s`, but none in the
    hiccup: when the newcomer is near, and the longest gap between two steps."""
    pace, now = begun(), 0.0
    for _ in range(head_start):
        pace.put(MIB, now)
    stepped, takes, longest = 0.0, entry_s, 0.0
    while True:
        now += 0.001
        assert now < 1000, "it never comes near"
        if now >= takes and not hiccup[0] <= now < hiccup[1]:
            pace.taken(now)
            takes = now + entry_s
            if pace.near:
                return now, longest
        if now - stepped >= step_s and pace.may_meet(now):
            longest, stepped = max(longest, now - stepped), now
            pace.put(MIB, now)


@pytest.mark.parametrize("entry_s", [0.02, 0.1, 0.5, 3.0])
def test_a_newcomer_comes_near_however_slow_it_is(entry_s: float) -> None:
    near, longest = follow(entry_s, 0.1, head_start=20)
    assert longest <= max(0.1, 2 * entry_s) + 0.01
    at_first = 20 + 2 * entry_s / 0.1  # nobody knows how fast it is before it has taken two
    assert near <= 2 * at_first * max(entry_s, 0.1) + 4 * entry_s


def test_one_that_stands_still_for_a_while_holds_nobody_up() -> None:
    """As it may in its first step."""
    _, longest = follow(0.1, 0.1, head_start=10, hiccup=(0.5, 30.0))
    assert longest < 1.0


def test_nobody_waits_for_one_that_has_not_begun_or_is_near() -> None:
    pace = Pace(MIB)
    for number in range(200):
        assert pace.may_meet(number * 0.01)
        pace.put(MIB, number * 0.01)
        assert not pace.near, "whatever was sent may lie on the way behind the state"
    near = begun()
    for number in range(200):
        near.put(MIB, number * 0.01)
        if near.behind > NEAR:
            near.taken(number * 0.01)
        assert near.may_meet(number * 0.01)


@pytest.mark.parametrize(("state", "room"), [(MIB, 256 * MIB), (1000 * MIB, 2000 * MIB)])
def test_memory_is_bounded(state: int, room: int) -> None:
    pace, now = Pace(state), 0.0
    while pace.may_meet(now):
        pace.put(100 * MIB, now)
        assert pace.behind * 100 * MIB <= room + 100 * MIB
    assert not pace.may_meet(1e9), "not even after any time"
    pace.taken(now)
    assert not pace.may_meet(now), "that was the state"
    pace.taken(now)
    assert pace.may_meet(now)
