"""What is applied counts once, is remembered in little room, and never in halves."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.applied import Applied, Name

names = st.tuples(st.integers(0, 2), st.integers(0, 30))


def of(members: set[Name]) -> Applied:
    applied = Applied()
    for name in members:
        assert applied.add(name)
    return applied


def runs(members: set[Name]) -> int:
    return sum((epoch, number - 1) not in members for epoch, number in members)


@given(st.lists(names, max_size=80))
def test_it_is_a_set_in_ranges(order: list[Name]) -> None:
    applied, members = Applied(), set[Name]()
    for name in order:
        assert applied.add(name) == (name not in members)
        members.add(name)
        assert sum(map(len, applied.epochs.values())) == 2 * runs(members), "one range for each run of numbers"
    for epoch in range(4):
        for number in range(32):
            assert ((epoch, number) in applied) == ((epoch, number) in members)


@given(st.sets(names, max_size=60), st.integers(0, 3), st.integers(0, 40))
def test_an_epoch_is_done_once_nothing_of_it_is_missing(members: set[Name], epoch: int, total: int) -> None:
    applied = of(members)
    missing = {number for a, b in applied.missing(epoch, total) for number in range(a, b)}
    assert missing == {number for number in range(total) if (epoch, number) not in members}
    assert applied.done(epoch, total) == (not missing)


@given(st.sets(names, max_size=60), st.sets(names, max_size=60))
def test_merging_is_the_union_and_leaves_the_other_as_it_was(left: set[Name], right: set[Name]) -> None:
    applied, other = of(left), of(right)
    applied.merge(other)
    assert applied == of(left | right)
    assert other == of(right)
    applied.add((0, 31))
    assert other == of(right), "nothing is shared"


@given(st.sets(names, max_size=60))
def test_it_comes_back_from_bytes_as_it_was(members: set[Name]) -> None:
    applied = of(members)
    assert Applied.decode(applied.encode()) == applied


@pytest.mark.parametrize(
    "epochs",
    [{0: [3]}, {0: [3, 3]}, {0: [0, 2, 2, 4]}, {0: [5, 1]}, {0: [-1, 4]}, {-1: [0, 1]}, {0: []}, {0: ["a", "b"]}],
)
def test_bytes_that_are_no_ranges_are_refused(epochs: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"no ranges|Expected `int`"):
        Applied.decode(msgspec.msgpack.encode({"epochs": epochs}))


@given(st.binary(max_size=60))
def test_noise_is_refused_or_is_a_set_that_works(noise: bytes) -> None:
    try:
        applied = Applied.decode(noise)
    except ValueError:
        return
    applied.add((0, 0))
    assert (0, 0) in applied


@pytest.mark.parametrize("name", [(0, -1), (-1, 0)])
def test_there_are_no_negative_micro_batches(name: Name) -> None:
    with pytest.raises(ValueError, match="there is no micro-batch"):
        Applied().add(name)


def test_room_follows_the_gaps_and_not_the_count() -> None:
    """A hundred thousand micro-batches, a few dozen of them under way at any time, in an order of their own."""
    random, applied = Random(3), Applied()
    under_way: list[int] = []
    for number in range(100_000):
        under_way.append(number)
        if len(under_way) == 32:
            assert applied.add((0, under_way.pop(random.randrange(32))))
        if number % 10_000 == 9_999:
            assert len(applied.encode()) < 500
    for number in under_way:
        applied.add((0, number))
    assert applied == Applied({0: [0, 100_000]})
