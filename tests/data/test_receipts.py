"""A digest of ids: who trained them and in which order does not matter, which ones they are does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.data.dealing import Dealing
from paceline.data.loader import Feed, build_feed
from paceline.data.order import Ids as Numbers
from paceline.data.order import mix
from paceline.data.partition import BatchShares, Split
from paceline.data.proof import Proof, compare, prove
from paceline.data.receipts import (
    BATCH,
    CHUNK,
    DIGEST,
    EPOCH,
    IDS,
    OWN_DRAWS,
    STEP,
    Receipt,
    Table,
    Tally,
    digest,
    digest_of_all,
    hashed,
    settled,
    signed,
    table,
)

ids_of = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40)


def array(ids: list[int]) -> Numbers:
    return np.array(ids, dtype=np.int64)


def test_the_hash_is_the_one_of_the_order() -> None:
    for number in (0, 1, 12345, (1 << 62) + 7):
        (word,) = hashed(array([signed(number + 0x9E3779B97F4A7C15)]))
        assert int(word) >> 1 == mix(number)


@given(ids_of, st.randoms(use_true_random=False), st.integers(1, 5))
def test_shares_add_up_in_any_order(ids: list[int], dice: random.Random, workers: int) -> None:
    whole = Tally.of(len(ids), [array(ids)])
    dice.shuffle(ids)
    cuts = np.array_split(array(ids), workers)
    rows = np.array([Tally.of(len(cut), [cut]) for cut in cuts], dtype=np.int64)
    assert Tally.total(rows) == whole == Tally.of(len(ids), cuts)
    assert whole.digest == signed(sum(int(word) for word in hashed(array(ids))))


@given(ids_of, st.data())
def test_any_other_ids_have_another_digest(ids: list[int], data: st.DataObject) -> None:
    other = data.draw(ids_of)
    assume(sorted(ids) != sorted(other))
    assert digest(array(ids)) != digest(array(other))


@pytest.mark.parametrize("n", [0, 1, 100, CHUNK, 2 * CHUNK + 3])
def test_all_ids_below_a_number(n: int) -> None:
    heard: list[int] = []
    assert digest_of_all(n, heard.append) == digest(np.arange(n)) and sum(heard) == n


@given(st.lists(ids_of, min_size=1, max_size=5), st.data())
def test_digests_taken_later_are_the_same(steps: list[list[int]], data: st.DataObject) -> None:
    now = [receipt(step, 0, 0, step, ids) for step, ids in enumerate(steps)]
    later = [
        made._replace(digest=array(ids)) if data.draw(st.booleans()) else made
        for made, ids in zip(now, steps, strict=True)
    ]
    assert settled(later).tolist() == [list(receipt) for receipt in now]


# runs


def trained(dealings: list[Dealing], epochs: int) -> tuple[list[list[int]], list[Receipt]]:
    """The ids and the receipts of a run that goes right."""
    ids: list[list[int]] = []
    receipts: list[Receipt] = []
    for epoch in range(epochs):
        for loader, dealing in enumerate(dealings):
            assert dealing.steps is not None
            for batch in range(dealing.steps):
                ids.append(batch_ids(dealing, epoch, batch))
                receipts.append(receipt(len(receipts), epoch, loader, batch, ids[-1]))
    return ids, receipts


def batch_ids(dealing: Dealing, epoch: int, batch: int) -> list[int]:
    found = []
    for order, size in dealing._lines(dealing.length):
        found += order.ids(epoch, batch * size, (batch + 1) * size).tolist()
    return found


def receipt(step: int, epoch: int, loader: int, batch: int, ids: list[int]) -> Receipt:
    return Receipt(step, epoch, loader, batch, *Tally.of(len(ids), [array(ids)]))


@st.composite
def dealt(draw: st.DrawFn) -> Dealing:
    kind, slots = draw(st.sampled_from(["batches", "rows", "items"])), draw(st.integers(1, 4))
    n, batch = draw(st.integers(2, 60)), draw(st.integers(slots, 16))
    order = draw(st.sampled_from(["sequential", "shuffled"]))
    dealing = Dealing(kind, slots, draw(st.integers(0, 99)), n, order, n, 0 if kind == "items" else batch)
    if kind != "items":
        drops = Dealing(kind, slots, dealing.seed, n, order, n, batch, drop_last=True)
        return drops if draw(st.booleans()) and drops.steps else dealing
    return dealing


@given(dealt(), st.integers(1, 3))
def test_a_run_that_goes_right_is_proven(dealing: Dealing, epochs: int) -> None:
    ids, receipts = trained([dealing], epochs)
    proof = prove(table(receipts), [dealing], len(receipts))
    assert proof.violations == []
    assert sum(checked.steps for checked in proof.checked) == len(receipts)
    assert sum(checked.samples for checked in proof.checked) == sum(map(len, ids))
    if not dealing.drop_last:
        (checked,) = proof.checked
        assert checked.epochs == (0, epochs - 1) and "exactly once" in checked.proven
        assert sorted(i for batch in ids for i in batch) == sorted(list(range(dealing.samples)) * epochs)


@given(dealt(), st.integers(1, 3), st.data())
def test_any_change_of_the_ids_names_its_step(dealing: Dealing, epochs: int, data: st.DataObject) -> None:
    """A sample lost, doubled or exchanged for another: in a step, or between two."""
    ids, receipts = trained([dealing], epochs)
    step = data.draw(st.integers(0, len(ids) - 1))
    changed = list(ids[step])
    kind = data.draw(st.sampled_from(["lost", "doubled", "exchanged", "swapped"]))
    touched = {step}
    if kind == "lost":
        changed.pop()
    elif kind == "doubled":
        changed.append(changed[0])
    elif kind == "exchanged":
        changed[0] = data.draw(st.integers(0, dealing.samples))
    else:
        other = data.draw(st.integers(0, len(ids) - 1))
        changed[0], ids[other][0] = ids[other][0], changed[0]
        touched.add(other)
    before = [sorted(batch_ids(dealing, r.epoch, r.batch)) for r in receipts]
    ids[step] = changed
    assume(any(sorted(ids[at]) != before[at] for at in touched))
    rows = table([receipt(r.step, r.epoch, 0, r.batch, ids[r.step]) for r in receipts])
    found = prove(rows, [dealing], len(rows)).violations
    for at in touched:
        if sorted(ids[at]) != before[at]:
            assert any(f"step {at} " in why for why in found), (at, found)


@given(dealt(), st.data())
def test_missing_and_repeated_receipts_are_found(dealing: Dealing, data: st.DataObject) -> None:
    _, receipts = trained([dealing], 2)
    gone = data.draw(st.integers(0, len(receipts) - 1))
    rest = receipts[:gone] + receipts[gone + 1 :]
    found = prove(table(rest), [dealing], len(receipts)).violations
    assert len(found) == 1 and f"step {gone} has no receipt" in found[0]
    twice = receipts[: gone + 1] + receipts[gone:]
    assert f"step {gone}:" in prove(table(twice), [dealing], len(receipts)).violations[0]


@given(dealt(), st.data())
def test_a_run_may_end_anywhere(dealing: Dealing, data: st.DataObject) -> None:
    ids, receipts = trained([dealing], 2)
    end = data.draw(st.integers(1, len(receipts)))
    proof = prove(table(receipts[:end]), [dealing], end)
    assert proof.violations == []
    assert sum(checked.samples for checked in proof.checked) == sum(map(len, ids[:end]))


SHUFFLED = Dealing("batches", 4, 7, 50, "shuffled", 50, 12)


def shown(proof: Proof) -> list[tuple[str, tuple[int, int], str]]:
    return [(checked.what, checked.epochs, checked.proven) for checked in proof.checked]


def test_two_loaders_are_proven_one_by_one() -> None:
    other = Dealing("batches", 4, 8, 30, "sequential", 30, 15)
    _, receipts = trained([SHUFFLED, other], 3)
    assert shown(prove(table(receipts), [SHUFFLED, other], len(receipts))) == [
        ("loader 0", (0, 2), "every one of 50 samples exactly once, each in its step"),
        ("loader 1", (0, 2), "every one of 30 samples exactly once, each in its step"),
    ]


def test_an_epoch_left_early_is_told() -> None:
    _, receipts = trained([SHUFFLED], 2)
    rows = [r for r in receipts if (r.epoch, r.batch) < (0, 3) or r.epoch]
    rows = [r._replace(step=step) for step, r in enumerate(rows)]
    (why,) = prove(table(rows), [SHUFFLED], len(rows)).violations
    assert "epoch 0 of the loader: 3 of 5 batches" in why and "14 samples were not" in why


def test_batches_out_of_turn_are_told() -> None:
    _, receipts = trained([SHUFFLED], 1)
    rows = table(receipts)
    rows[[1, 2], 1:] = rows[[2, 1], 1:]
    assert prove(rows, [SHUFFLED], 5).violations == ["step 1: batch 2 of epoch 0 came where batch 1 was due"]


def test_more_or_fewer_receipts_than_steps() -> None:
    _, receipts = trained([SHUFFLED], 1)
    assert "steps 5-6 have no receipt: the run trained 7 steps" in prove(table(receipts), [SHUFFLED], 7).violations
    assert "step 4: there is a receipt" in prove(table(receipts), [SHUFFLED], 4).violations[0]
    assert prove(table(receipts), [SHUFFLED], None).violations == []


def test_damaged_numbers_are_told() -> None:
    _, receipts = trained([SHUFFLED], 1)
    for column, value, says in [
        (BATCH, 1 << 60, "has no batch"),
        (BATCH, -3, "has no batch"),
        (EPOCH, -1, "went back"),
        (IDS, -5, "-5 samples were delivered instead of 12"),
        (DIGEST, 0, "not those of this batch"),
    ]:
        rows = table(receipts)
        rows[2, column] = value
        assert says in prove(rows, [SHUFFLED], 5).violations[0]
    rows = table(receipts)
    rows[2, 2] = 9
    assert "step 2: loader 9 is none of the run's 1" in prove(rows, [SHUFFLED], 5).violations


def test_a_sampler_that_goes_through_everything_is_told_from_one_that_chooses() -> None:
    dealing = Dealing("batches", 2, 0, 10, "sampler", 10, 4)
    once = [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    chosen = [[1, 1, 1, 1], [5, 4, 3, 2], [1, 0]]
    for ids, says in [(once, "every one of 10 samples exactly once; in which"), (chosen, "the sampler's choice")]:
        rows = table([receipt(step, 0, 0, step, ids[step]) for step in range(3)])
        proof = prove(rows, [dealing], 3)
        assert proof.violations == [] and says in proof.checked[0].proven
    short = table([receipt(step, 0, 0, step, once[step][:1]) for step in range(3)])
    assert "1 samples were delivered instead of 4" in prove(short, [dealing], 3).violations[0]


def test_given_batches_and_streams_say_what_holds() -> None:
    given = Dealing("given", 2, 0, 10)
    rows = table([receipt(0, 0, 0, 0, [3, 4, 5]), receipt(1, 0, 0, 1, [1])])
    assert "the sampler's choice" in prove(rows, [given], 2).checked[0].proven
    stream = Dealing("stream", 3, 0)
    items = [receipt(0, 0, 0, 0, [0, 1, 2]), receipt(1, 0, 0, 1, [3]), receipt(2, 1, 0, 0, [0, 1])]
    proof = prove(table(items), [stream], 3)
    assert proof.violations == [] and "items in turn" in proof.checked[0].proven
    items[0] = receipt(0, 0, 0, 0, [0, 1, 1])
    assert "step 0 (epoch 0, batch 0)" in prove(table(items), [stream], 3).violations[0]


def test_own_draws_are_taken_once_each() -> None:
    rows = [receipt(step, 0, OWN_DRAWS, 4, [0, 1, 2, 3]) for step in range(3)]
    assert prove(table(rows), [], 3).violations == []
    for ids in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 4]):
        rows[1] = receipt(1, 0, OWN_DRAWS, 4, ids)
        assert prove(table(rows), [], 3).violations == ["step 1: not every draw of the step was taken once"]
    rows[1] = receipt(1, 0, OWN_DRAWS, 1 << 60, [0])
    assert len(prove(table(rows), [], 3).violations) == 1


# what the loader delivers


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index


def delivered(feed: Feed, slots: range) -> list[list[tuple[Any, list[int]]]]:
    """(value, ids) of every share, by step."""
    feed.start(1, 0, slots)
    found = []
    for step in range(feed.steps or 0):
        shares = [feed.share(1, step, slot) for slot in reversed(range(4))]
        found.append([(share.value, share.ids.tolist()) for share in shares if share is not None])
    feed.stop()
    return found


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}, {"shuffle": False}])
@pytest.mark.parametrize("slots", [range(4), range(1, 3), range(0)])
def test_a_share_comes_with_the_ids_that_are_in_it(more: dict[str, Any], slots: range) -> None:
    """In the slots' order or not, read ahead or fetched at once."""
    loader = DataLoader(Ids(), **{"batch_size": 8, "shuffle": True, **more})
    steps = delivered(build_feed(loader, 4, Split(), 3), slots)
    assert all(value.tolist() == ids for shares in steps for value, ids in shares)
    assert sorted(i for shares in steps for _, ids in shares for i in ids) == list(range(22))


@pytest.mark.parametrize("tensors", [True, False])
def test_a_mistake_in_dealing_shows(monkeypatch: pytest.MonkeyPatch, tensors: bool) -> None:
    """Two slots get the same samples: the counts are right, but not the digests."""
    cut = BatchShares._cut
    monkeypatch.setattr(BatchShares, "_cut", lambda self, step: [cut(self, step)[0], *cut(self, step)[:-1]])
    data: Any = TensorDataset(torch.arange(24)) if tensors else Ids()
    feed = build_feed(DataLoader(data, batch_size=8, shuffle=True), 4, Split(), 3)
    rows = [
        receipt(step, 1, 0, step, [i for _, ids in shares for i in ids])
        for step, shares in enumerate(delivered(feed, range(4)))
    ]
    found = prove(table(rows), [feed.dealing], len(rows)).violations
    assert "step 0 (epoch 1, batch 0): 8 samples were delivered, but not those of this batch" in found


# two runs


def both(one: Table, other: Table, same_seed: bool = True) -> list[str]:
    return compare(one, other, ("mine", "yours"), same_seed)


@given(dealt(), st.data())
def test_the_first_difference_of_two_runs_is_named(dealing: Dealing, data: st.DataObject) -> None:
    _, receipts = trained([dealing], 2)
    one, other = table(receipts), table(receipts)
    assert both(one, other) == []
    step = data.draw(st.integers(0, len(one) - 1))
    other[step, DIGEST] += 1
    assert both(one, other) == [f"step {step}: mine and yours trained different samples"]


def test_differences_in_words() -> None:
    _, receipts = trained([SHUFFLED], 2)
    one = table(receipts)
    assert both(one, one[:7]) == ["mine has 10 steps, yours only 7"]
    for column, says in [(STEP, "not in both"), (EPOCH, "epoch 0 in mine, epoch 1"), (IDS, "samples in mine")]:
        other = one.copy()
        other[4, column] += 1
        assert says in both(one, other)[0]
    draws = table([receipt(0, 0, OWN_DRAWS, 1, [0])])
    assert both(draws, draws, same_seed=False) == ["the seeds differ, so the scripts' own draws do too"]
