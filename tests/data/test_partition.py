"""How batches are cut: every sample once, sizes as promised."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import Order, Shuffled
from paceline.data.partition import (
    BatchShares,
    GivenBatches,
    ItemShares,
    RowShares,
    Shares,
    Split,
    by_proportion,
    by_rows,
    evenly,
    skew,
)
from paceline.errors import UsageError

EVEN = Split()
positive = st.lists(st.fractions(Fraction(1, 20), 20, max_denominator=20), min_size=1, max_size=8)


def covers(ranges: list[tuple[int, int]], total: int) -> bool:
    return [x for first, last in ranges for x in range(first, last)] == list(range(total))


@given(st.integers(0, 300), st.integers(1, 40))
def test_even_parts_cover_and_differ_by_at_most_one(total: int, parts: int) -> None:
    ranges = evenly(total, parts)
    sizes = [last - first for first, last in ranges]
    assert covers(ranges, total) and len(ranges) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 300), positive)
def test_proportions_cover_and_none_is_off_by_one(total: int, weights: list[Fraction]) -> None:
    ranges = by_proportion(total, weights)
    assert covers(ranges, total)
    for (first, last), weight in zip(ranges, weights, strict=True):
        assert abs((last - first) - total * weight / sum(weights)) < 1


@given(st.integers(1, 300), positive)
def test_the_first_part_is_never_empty(total: int, weights: list[Fraction]) -> None:
    """A worker whose slot has no sample borrows one of slot 0's."""
    first, last = by_proportion(total, weights)[0]
    assert last > first


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1, 3]])
def test_impossible_weights_are_refused(weights: list[int]) -> None:
    with pytest.raises(UsageError, match="weights must be positive"):
        by_proportion(10, weights)


@given(st.integers(0, 300), st.integers(1, 40))
def test_blocks_of_rows_cover_and_all_but_the_last_ones_are_alike(rows: int, parts: int) -> None:
    ranges = by_rows(rows, parts)
    assert covers(ranges, rows) and len(ranges) == parts
    size = -(-rows // parts)
    assert all(last - first == size for first, last in ranges if last < rows)


def test_skew_is_how_far_the_largest_is_above_the_mean() -> None:
    assert skew([5, 5, 5]) == 0.0
    assert skew([4, 2, 0]) == 1.0
    assert skew([3, 2, 1]) == pytest.approx(0.5)
    assert skew([]) == 0.0 and skew([0, 0]) == 0.0


# --split


def test_splits_are_parsed() -> None:
    assert Split.parse("even", 4) == Split("even")
    assert Split.parse("rows", 4) == Split("rows")
    assert Split.parse("1,2,0.5", 3) == Split("proportion", (Fraction(1), Fraction(2), Fraction(1, 2)))
    assert Split.parse("1/3, 2/3", 2).weights == (Fraction(1, 3), Fraction(2, 3))


@pytest.mark.parametrize(
    ("text", "slots", "says"),
    [
        ("odd", 2, "none of: even, rows"),
        ("", 2, "none of: even, rows"),
        ("1,,2", 3, "none of: even, rows"),
        ("1,2/0", 2, "none of: even, rows"),
        ("1,nan", 2, "none of: even, rows"),
        ("1,inf", 2, "none of: even, rows"),
        ("1,2,3", 4, "3 weights for 4 slots"),
        ("1", 2, "1 weights for 2 slots"),
        ("1,0", 2, "above zero"),
        ("1,-2", 2, "above zero"),
    ],
)
def test_wrong_splits_are_refused_in_words(text: str, slots: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Split.parse(text, slots)


def test_a_split_cuts_a_batch() -> None:
    assert Split.parse("1,1,2", 3).cut(8, 3) == [(0, 2), (2, 4), (4, 8)]
    assert EVEN.cut(7, 3) == [(0, 3), (3, 5), (5, 7)]


# shares


def epoch_of(shares: Shares, epoch: int, slots: int) -> list[int]:
    """All samples of an epoch, and what `sizes` says checked against `ids` on the way."""
    samples: list[int] = []
    for step in range(shares.steps):
        parts = [shares.ids(epoch, step, slot).tolist() for slot in range(slots)]
        assert shares.sizes(epoch, step) == [len(part) for part in parts]
        assert any(parts), "a step has something to train"
        samples += [sample for part in parts for sample in part]
    return samples


sizes = st.tuples(st.integers(1, 120), st.integers(1, 8), st.integers(0, 12))


@given(sizes, st.booleans(), st.booleans(), st.integers(0, 3))
def test_batches_train_every_sample_once(case: tuple[int, int, int], shuffle: bool, drop: bool, epoch: int) -> None:
    n, slots, more = case
    batch = slots + more
    order = Shuffled(n, 5) if shuffle else Order(n)
    shares = BatchShares(order, batch, slots, EVEN, drop)
    samples = epoch_of(shares, epoch, slots)
    whole = order.ids(epoch, 0, n).tolist()
    assert samples == (whole[: n // batch * batch] if drop else whole), "in the order, slot after slot"


@given(sizes, positive)
def test_batches_in_proportion_train_every_sample_once(case: tuple[int, int, int], weights: list[Fraction]) -> None:
    n, _, more = case
    slots = len(weights)
    shares = BatchShares(Order(n), slots + more, slots, Split("proportion", tuple(weights)), False)
    assert epoch_of(shares, 0, slots) == list(range(n))


def test_a_last_batch_smaller_than_the_slots_fills_the_first_ones() -> None:
    shares = BatchShares(Order(10), 8, 4, EVEN, drop_last=False)
    assert shares.steps == 2
    assert shares.sizes(0, 1) == [1, 1, 0, 0]
    assert [shares.ids(0, 1, slot).tolist() for slot in range(4)] == [[8], [9], [], []]


def test_shares_can_be_asked_in_any_order_across_the_window() -> None:
    """The window over the order holds some thousand positions; steps before and after it must come out too."""
    n, batch, slots = 40_000, 100, 3
    shares = BatchShares(Shuffled(n, 1), batch, slots, EVEN, False)
    whole = {epoch: Shuffled(n, 1).ids(epoch, 0, n) for epoch in (0, 1)}
    rng = random.Random(1)
    for _ in range(300):
        epoch, step, slot = rng.randrange(2), rng.randrange(shares.steps), rng.randrange(slots)
        first, last = evenly(batch, slots)[slot]
        want = whole[epoch][step * batch + first : step * batch + last]
        assert shares.ids(epoch, step, slot).tolist() == want.tolist()


def test_a_batch_larger_than_the_window_and_than_the_set() -> None:
    assert epoch_of(BatchShares(Order(20_000), 9000, 2, EVEN, False), 0, 2) == list(range(20_000))
    assert epoch_of(BatchShares(Order(5), 100, 4, EVEN, False), 0, 4) == list(range(5))
    assert BatchShares(Order(5), 100, 4, EVEN, True).steps == 0


@given(sizes, st.booleans(), st.integers(0, 3))
def test_rows_train_every_sample_once_and_stay_in_their_blocks(
    case: tuple[int, int, int], shuffle: bool, epoch: int
) -> None:
    n, slots, more = case
    shares = RowShares(n, slots + more, slots, 3, shuffle, drop_last=False)
    assert Counter(epoch_of(shares, epoch, slots)) == Counter(range(n))
    for slot, (first, last) in enumerate(by_rows(n, slots)):
        own = [sample for step in range(shares.steps) for sample in shares.ids(epoch, step, slot).tolist()]
        assert sorted(own) == list(range(first, last))


def test_rows_with_drop_last_end_with_the_shortest_block() -> None:
    shares = RowShares(22, 6, 3, 0, shuffle=False, drop_last=True)  # blocks of 8, 8 and 6 rows, two a step
    assert shares.steps == 3
    assert all(shares.sizes(0, step) == [2, 2, 2] for step in range(3))


def test_rows_of_different_slots_are_shuffled_differently_and_by_epoch() -> None:
    shares = RowShares(80, 8, 2, 1, shuffle=True, drop_last=False)
    order = [
        [int(x) - slot * 40 for step in range(shares.steps) for x in shares.ids(epoch, step, slot)]
        for epoch in (0, 1)
        for slot in (0, 1)
    ]
    assert len({tuple(row) for row in order}) == 4


def test_rows_need_a_sample_a_slot() -> None:
    with pytest.raises(UsageError, match="batch of at least the 4 slots; it is 3"):
        RowShares(100, 3, 4, 0, False, False)


class Batches:
    """A user's batch sampler: uneven batches, drawn anew each epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.drawn = n, 0

    def __len__(self) -> int:
        return (self.n + 4) // 5

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.drawn += 1
        order = torch.randperm(self.n).tolist()
        yield from (order[at : at + 5] for at in range(0, self.n, 5))


@given(st.integers(1, 60), st.integers(1, 8))
def test_given_batches_are_cut_and_every_sample_is_trained_once(n: int, slots: int) -> None:
    source = Batches(n)
    shares = GivenBatches(source, slots, EVEN, seed=3)
    assert shares.steps == len(source)
    for epoch in (0, 1):
        assert sorted(epoch_of(shares, epoch, slots)) == list(range(n))
    assert source.drawn == 2, "once an epoch"


def test_given_batches_keep_the_samplers_batches_together() -> None:
    shares = GivenBatches([[4, 5, 6], [1], [9, 8, 7, 3, 2]], 2, EVEN, seed=0)
    steps = [[shares.ids(0, step, slot).tolist() for slot in range(2)] for step in range(3)]
    assert steps == [[[4, 5], [6]], [[1], []], [[9, 8, 7], [3, 2]]]


def test_given_batches_are_the_same_on_every_worker_and_other_in_another_epoch() -> None:
    drawn = []
    for epoch in (1, 1, 2):
        torch.manual_seed(random.randrange(1000))
        shares = GivenBatches(Batches(30), 2, EVEN, seed=3)
        drawn.append(epoch_of(shares, epoch, 2))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_batch_sampler_and_its_sampler_are_told_the_epoch() -> None:
    told: list[tuple[str, int]] = []

    class Inner:
        def set_epoch(self, epoch: int) -> None:
            told.append(("inner", epoch))

    class Outer:
        sampler = Inner()

        def set_epoch(self, epoch: int) -> None:
            told.append(("outer", epoch))

        def __len__(self) -> int:
            return 1

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield [0, 1]

    shares = GivenBatches(Outer(), 2, EVEN, 0)
    shares.ids(4, 0, 0)
    assert told == [("outer", 4), ("inner", 4)]


@given(st.integers(1, 60), st.integers(1, 8), st.booleans())
def test_items_train_every_item_once(n: int, slots: int, shuffle: bool) -> None:
    order = Shuffled(n, 2) if shuffle else Order(n)
    shares = ItemShares(order, slots)
    assert epoch_of(shares, 1, slots) == order.ids(1, 0, n).tolist()


def test_ids_are_plain_int64() -> None:
    for shares in (
        BatchShares(Order(9), 4, 2, EVEN, False),
        RowShares(9, 4, 2, 0, True, False),
        GivenBatches([[1, 2]], 2, EVEN, 0),
        ItemShares(Order(9), 2),
    ):
        assert shares.ids(0, 0, 0).dtype == np.int64
