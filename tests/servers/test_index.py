"""Ids and their numbers, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.index import Grown, Index, mixed

ID = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 40)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.lists(ID, unique=True, max_size=60)), max_size=12))
def test_an_index_is_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    index, model = Index(), dict[int, int]()
    for what, ids in steps:
        if what == "add":
            new = [one for one in ids if one not in model]
            numbers = index.add(array(new)).tolist()
            assert not set(numbers) & set(model.values())
            model.update(zip(new, numbers, strict=True))
        else:
            gone = [one for one in ids if one in model]
            index.remove(array([model.pop(one) for one in gone]))
        assert index.find(array(ids)).tolist() == [model.get(one, -1) for one in ids]
        assert len(index) == len(model)
    assert index.find(array(list(model))).tolist() == list(model.values())
    assert index.top <= max((len(model), *(60 * len(steps),)))


def test_many_ids_that_begin_at_the_same_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.servers.index.mixed", lambda ids: np.zeros(len(ids), dtype=np.uint64))
    index, ids = Index(), np.arange(300)
    numbers = index.add(ids)
    assert (index.find(ids) == numbers).all()
    index.remove(numbers[::2])
    assert (index.find(ids[::2]) == -1).all() and (index.find(ids[1::2]) == numbers[1::2]).all()


def test_an_index_of_many_ids_that_come_and_go_stays_small() -> None:
    index = Index()
    for turn in range(200):
        numbers = index.add(np.arange(turn * 1000, (turn + 1) * 1000))
        if turn >= 3:
            old = index.find(np.arange((turn - 3) * 1000, (turn - 2) * 1000))
            assert (old >= 0).all()
            index.remove(old)
    assert len(index) == 3000 and index.top == 4000 and len(numbers) == 1000
    assert index.nbytes < 200_000


def test_ids_are_mixed_without_two_becoming_one() -> None:
    ids = np.arange(-50_000, 50_000)
    assert len(np.unique(mixed(ids))) == len(ids)
    low, high = mixed(ids) & np.uint64(15), mixed(ids) >> np.uint64(60)
    for bits in (low, high):
        assert np.ptp(np.bincount(bits.astype(np.int64), minlength=16)) < 700


def test_a_grown_array_keeps_what_was_written() -> None:
    grown = Grown(np.float32, 3)
    grown.array[:1000] = 7.0
    grown.reserve(1_000_000)
    assert len(grown.array) >= 1_000_000 and (grown.array[:1000] == 7.0).all() and (grown.array[2000:] == 0.0).all()


def test_an_array_grows_under_a_view_that_somebody_keeps() -> None:
    grown = Grown(np.int64)
    grown.array[:] = 3
    kept = grown.array[:5]
    grown.reserve(5000)
    grown.array[0] = 4
    assert kept.tolist() == [3] * 5 and grown.array[:3].tolist() == [4, 3, 3]
