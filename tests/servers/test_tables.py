"""Ids, each once, by fragments; rows as bytes and back."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.rows import PLACES, places
from paceline.servers.tables import FRAGMENTS, NOTHING, added, distinct, pack, packed_size, unpack

ids64 = st.integers(-(1 << 63), (1 << 63) - 1)
some_ids = st.lists(st.one_of(ids64, st.integers(-3, 3)), max_size=60)


@given(some_ids)
def test_each_id_comes_once_and_those_of_a_fragment_lie_together(ids: list[int]) -> None:
    given_ids = np.array(ids, dtype=np.int64)
    touched, inverse = distinct(given_ids)
    assert sorted(touched.ids.tolist()) == sorted(set(ids))
    assert touched.ids[inverse].tolist() == ids
    covered = []
    for number, where in touched.by_fragment(range(100, 100 + FRAGMENTS)):
        at = places(touched.ids[where]) // (PLACES // FRAGMENTS)
        assert set(at.tolist()) == {number - 100}
        covered += touched.ids[where].tolist()
    assert covered == touched.ids.tolist()


@given(some_ids, some_ids)
def test_ids_are_found_among_others(ids: list[int], others: list[int]) -> None:
    mine, theirs = (distinct(np.array(each, dtype=np.int64))[0] for each in (ids, others))
    at = mine.find(theirs)
    assert [k >= 0 for k in at] == [each in set(others) for each in mine.ids.tolist()]
    assert theirs.ids[at[at >= 0]].tolist() == mine.ids[at >= 0].tolist()
    assert (mine.find(NOTHING) == -1).all()


@given(st.lists(st.lists(st.integers(-4, 4), unique=True, max_size=6), min_size=1, max_size=4))
def test_contributions_are_added_by_id(brought: list[list[int]]) -> None:
    want: dict[int, float] = defaultdict(float)
    contributions = []
    for number, ids in enumerate(brought):
        touched, _ = distinct(np.array(ids, dtype=np.int64))
        rows = np.stack([touched.ids + 10 * number] * 3, axis=1).astype(np.float32)
        contributions.append((touched, rows.reshape(-1, 3)))
        for each in ids:
            want[each] += each + 10 * number
    touched, sums = added(contributions)
    assert dict(zip(touched.ids.tolist(), sums[:, 2].tolist(), strict=True)) == want


@given(some_ids, some_ids, st.integers(0, 5))
def test_rows_of_several_fragments_are_cut_apart_again(first: list[int], second: list[int], dim: int) -> None:
    fragments = []
    for ids in (first, second):
        rows = np.arange(len(ids) * dim, dtype=np.float32).reshape(len(ids), dim)
        fragments.append((np.array(ids, dtype=np.int64), rows))
    body = memoryview(b"".join(part for fragment in fragments for part in pack(*fragment)))
    for ids, rows in fragments:
        size = packed_size(body, dim)
        got_ids, got_rows = unpack(body[:size], dim)
        assert got_ids.tolist() == ids.tolist() and got_rows.tolist() == rows.tolist()
        body = body[size:]
    assert not len(body)


@pytest.mark.parametrize("body", [b"", b"1234567", (2).to_bytes(8, "little") + bytes(16), b"\xff" * 64])
def test_bytes_that_are_cut_off_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="bytes for"):
        unpack(memoryview(body), dim=3)
