"""Who has which slot in a flat loop's step that has lost workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.loop.flat import dealt_anew


def test_survivors_keep_their_slots_and_newcomers_fill_the_gaps() -> None:
    deal = {0: 0, 1: 1, 2: 2, 3: 3}
    fewer = dealt_anew(deal, (1, 3), 4)
    assert fewer == {1: 1, 3: 3}
    assert dealt_anew(fewer, (1, 3, 4), 4) == {1: 1, 3: 3, 4: 0}


@given(st.integers(1, 6), st.data())
def test_whoever_comes_and_goes_nobody_shares_a_slot_or_changes_it(slots: int, data: st.DataObject) -> None:
    deal = {member: member for member in range(slots)}
    newest = slots
    for _ in range(data.draw(st.integers(0, 8))):
        members = list(deal)
        if len(members) > 1 and (len(members) == slots or data.draw(st.booleans())):
            members.remove(data.draw(st.sampled_from(members)))
        elif len(members) < slots:
            members.append(newest)
            newest += 1
        after = dict(dealt_anew(deal, members, slots))
        assert len(set(after.values())) == len(after) and set(after.values()) <= set(range(slots))
        assert all(after[member] == deal[member] for member in after if member in deal)
        deal = after
