"""Who is in a round, and who trains whose shares."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.strategies.presence import (
    Ask,
    Deal,
    Drop,
    Enter,
    Follow,
    Here,
    Meet,
    Wait,
    decide,
    owed,
    taken_over,
    trainer,
)


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, Deal]:
    """Slots, and a round in which some of them were dropped, one time after the other."""
    slots = draw(st.integers(1, 8))
    deal = [sorted(draw(st.sets(st.integers(0, slots - 1), min_size=1)))]
    while len(deal[-1]) > 1 and draw(st.booleans()):
        deal.append(sorted(draw(st.sets(st.sampled_from(deal[-1]), min_size=1, max_size=len(deal[-1]) - 1))))
    return slots, deal


@given(deals(), st.integers(0, 99))
def test_every_share_is_trained_by_one_who_is_in_the_round_and_by_its_own_replica_if_that_is(
    dealt: tuple[int, Deal], step: int
) -> None:
    slots, deal = dealt
    for slot in range(slots):
        assert trainer(step, slot, deal) in deal[-1]
        assert slot not in deal[-1] or trainer(step, slot, deal) == slot
    others = [slot for replica in range(slots) for slot in taken_over(step, replica, slots, deal)]
    assert sorted(others) == [slot for slot in range(slots) if slot not in deal[-1]]


@given(deals(), st.sets(st.integers(0, 30), max_size=6))
def test_what_is_made_up_for_is_what_the_lost_ones_had_and_nothing_else(
    dealt: tuple[int, Deal], steps: set[int]
) -> None:
    slots, deal = dealt
    before = deal[:-1] or deal
    lost = [(step, slot) for step in steps for slot in range(slots) if trainer(step, slot, before) not in deal[-1]]
    made_up = [share for replica in range(slots) for share in owed(steps, replica, slots, before, deal)]
    assert sorted(made_up) == sorted(lost)


def test_the_shares_of_a_lost_one_are_spread_over_the_others() -> None:
    takers = [trainer(step, 3, [[0, 1, 2, 3], [0, 1, 2]]) for step in range(30)]
    assert {takers.count(replica) for replica in range(3)} == {10}


@st.composite
def assemblies(draw: st.DrawFn) -> tuple[list[Here], int]:
    """Some of a round are here, perhaps with others; a few know more than the rest."""
    slots, deal = draw(deals())
    there = sorted(draw(st.sets(st.integers(0, slots - 1), min_size=1)))
    rounds, term = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    return [
        Here(
            slot,
            rounds - draw(st.integers(0, 1)) if draw(st.booleans()) else rounds,
            term + draw(st.integers(0, 1)),
            draw(st.booleans()),
            deal[: draw(st.integers(1, len(deal)))] if draw(st.booleans()) else deal,
        )
        for slot in there
    ], term


@given(assemblies(), st.integers(1, 4))
def test_what_is_decided(assembly: tuple[list[Here], int], least: int) -> None:
    here, term = assembly
    there = {h.slot for h in here}
    deal = max((h.deal for h in here), key=len)
    same = len({h.rounds for h in here}) == 1 and all(h.deal == deal for h in here)
    match decide(here, term, least):
        case Enter(agreed):
            assert agreed == term + 1 and all(h.term == agreed for h in here)
        case Ask():
            assert {h.term for h in here} == {term, term + 1}
        case Follow(followed):
            assert followed == deal and not same
        case Meet():
            assert not same or there >= set(deal[-1])
        case Wait(below, why):
            assert same and (below or not all(h.waited for h in here)) and "lost" in why
        case Drop(slots, why):
            assert same and all(h.waited for h in here) and len(there) >= least
            assert slots and not there & set(slots) and set(slots) < set(deal[-1]), why


@given(assemblies(), st.integers(1, 4))
def test_nobody_is_left_alone_where_there_must_be_two(assembly: tuple[list[Here], int], least: int) -> None:
    here, term = assembly
    assume(len(here) < least)
    assert not isinstance(decide(here, term, least), Drop)
