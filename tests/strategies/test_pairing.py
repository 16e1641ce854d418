"""Who averages with whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.pairing import pairs, partner

SLOTS = st.sets(st.integers(0, 40), min_size=1, max_size=12).map(sorted)
SEEDS = st.integers(0, 1 << 40)


@given(SLOTS, SEEDS, st.integers(0, 1000))
def test_everybody_has_one_partner_at_most_and_only_one_is_left_out(slots: list[int], seed: int, rounds: int) -> None:
    found = pairs(slots, seed, rounds)
    paired = [slot for pair in found for slot in pair]
    assert len(set(paired)) == len(paired) == len(slots) // 2 * 2 and set(paired) <= set(slots)
    for slot in slots:
        other = partner(slot, slots, seed, rounds)
        assert (other is None) == (slot not in paired)
        assert other is None or (other != slot and partner(other, slots, seed, rounds) == slot)
    assert pairs(list(reversed(slots)), seed, rounds) == found, "it depends on the order in which they are named"


@given(st.sets(st.integers(0, 40), min_size=2, max_size=8).map(sorted), SEEDS)
def test_in_time_everybody_meets_everybody(slots: list[int], seed: int) -> None:
    met = {pair for rounds in range(400) for pair in pairs(slots, seed, rounds)}
    assert met == {(a, b) for a in slots for b in slots if a < b}


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), SEEDS)
def test_replicas_that_do_not_train_come_to_their_mean(weights: list[float], seed: int) -> None:
    mean, largest = sum(weights) / len(weights), max(map(abs, weights))
    for rounds in range(400):
        for a, b in pairs(range(len(weights)), seed, rounds):
            weights[a] = weights[b] = (weights[a] + weights[b]) / 2
    assert all(abs(weight - mean) <= 1e-9 * (1 + largest) for weight in weights)
