"""From a user's DataLoader to shares: the same samples whatever the loader, its processes, and who asks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data import loader as loader_module
from paceline.data.copies import strided
from paceline.data.loader import AheadFeed, MapFeed, StreamFeed, TensorFeed, build_feed
from paceline.data.partition import Split
from paceline.errors import UsageError
from tests.data.loaders import EVEN, ROWS, Augmented, Many, Stream, numbers, own_collate, plain, steps_of, value


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [EVEN, ROWS, Split.parse("1,2,1,4", 4)], ids=["even", "rows", "proportion"])
def test_the_fast_path_for_tensors_equals_the_general_one(shuffle: bool, drop_last: bool, split: Split) -> None:
    def loader(**more: Any) -> DataLoader[Any]:
        return DataLoader(numbers(45), batch_size=8, shuffle=shuffle, drop_last=drop_last, **more)

    fast = build_feed(loader(), 4, split, 3)
    general = build_feed(loader(collate_fn=own_collate), 4, split, 3)
    assert type(fast) is TensorFeed and type(general) is MapFeed
    assert fast.steps == general.steps and fast.batch == general.batch == 8
    for epoch in (0, 1):
        one, two = (steps_of(feed, range(4), epoch) for feed in (fast, general))
        assert plain(one) == plain(two)
        assert all(type(share) is list for step in one for share in step if share is not None)
        for step in range(fast.steps or 0):
            held = [0 if share is None else len(share[1]) for share in one[step]]
            assert fast.sizes(epoch, step) == general.sizes(epoch, step) == held
    if not drop_last:
        assert sorted(x for step in plain(one) for share in step if share for x in share[1]) == list(range(45))
    assert plain(fast.stand_in(0, 0)) == plain(general.stand_in(0, 0))


def test_one_worker_with_all_slots_gets_what_several_get_together() -> None:
    feed = build_feed(DataLoader(Augmented(), batch_size=10, shuffle=True), 4, EVEN, 3)
    whole = plain(steps_of(feed, range(4), epoch=2))
    parts = [plain(steps_of(feed, slots, epoch=2)) for slots in (range(1), range(1, 3), range(3, 4))]
    assert [[*a, *b, *c] for a, b, c in zip(*parts, strict=True)] == whole


def test_a_later_start_gives_the_rest_of_the_same_epoch() -> None:
    feed = build_feed(DataLoader(Augmented(), batch_size=5, shuffle=True), 2, EVEN, 3)
    whole = plain(steps_of(feed, range(2), epoch=1))
    assert plain(steps_of(feed, range(2), epoch=1, first=3)) == whole[3:]


@pytest.mark.parametrize("dataset", [Augmented, Many], ids=["getitem", "getitems"])
def test_loader_processes_change_nothing_not_even_random_augmentation(dataset: type[Augmented]) -> None:
    got = []
    for workers in (0, 2):
        torch.manual_seed(workers), random.seed(workers), np.random.seed(workers)
        feed = build_feed(DataLoader(dataset(), batch_size=7, shuffle=True, num_workers=workers), 3, EVEN, 9)
        got.append([plain(steps_of(feed, range(3), epoch)) for epoch in (0, 1)])
        del feed
    assert got[0] == got[1]
    drawn = [row for step in got[0][0] for share in step if share for row in share[0]]
    assert sorted(row[0] for row in drawn) == list(range(24))
    for column in (1, 2, 3):
        assert len({row[column] for row in drawn}) == 24, "every sample draws its own numbers"
    again = {row[0]: row[1:] for step in got[0][1] for share in step if share for row in share[0]}
    assert all(again[row[0]] != row[1:] for row in drawn), "another epoch augments differently"


def test_augmentation_depends_on_the_sample_not_on_its_batch() -> None:
    rows: list[dict[float, list[float]]] = []
    for batch, slots in ((7, 3), (4, 2)):
        feed = build_feed(DataLoader(Augmented(), batch_size=batch, shuffle=True), slots, EVEN, 9)
        steps = plain(steps_of(feed, range(slots)))
        rows.append({row[0]: row[1:] for step in steps for share in step if share for row in share[0]})
    assert rows[0] == rows[1]


def test_persistent_loader_processes_serve_several_epochs_and_positions() -> None:
    loader = DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
    feed = build_feed(loader, 2, EVEN, 9)
    other = build_feed(DataLoader(Augmented(), batch_size=6, shuffle=True), 2, EVEN, 9)
    for epoch, first in ((0, 0), (1, 2), (0, 1)):
        assert plain(steps_of(feed, range(2), epoch, first)) == plain(steps_of(other, range(2), epoch, first))


def test_leaving_in_the_middle_ends_the_loader_processes() -> None:
    feed = build_feed(DataLoader(Augmented(), batch_size=4, num_workers=2), 2, EVEN, 9)
    feed.start(0, 0, range(2))
    assert feed.share(0, 0, 0) is not None
    feed.stop()  # the leak fixture sees to the rest, while the feed is still there
    assert feed.share(0, 0, 1) is None


def test_a_list_of_samples_is_fetched_in_one_call_a_share() -> None:
    dataset = Many(10)
    dataset.asked = []
    feed = build_feed(DataLoader(dataset, batch_size=5), 2, EVEN, 0)
    steps_of(feed, range(2))
    assert dataset.asked == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]


class Rarely(Augmented):
    """Only sample 9 draws."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index == 9 else (torch.zeros(4), index)


class RarelyMany(Rarely, Many):
    pass


def masks_rarely(samples: list[Any]) -> Any:
    return own_collate(samples), random.random() if any(index == 9 for _, index in samples) else 0.0


@pytest.mark.parametrize("collate", [None, masks_rarely])
@pytest.mark.parametrize("dataset", [Rarely, RarelyMany])
def test_a_first_draw_after_many_shares_without_one_follows_the_sample_too(
    dataset: type[Augmented], collate: Any
) -> None:
    loader = DataLoader(dataset(), batch_size=4, collate_fn=collate)
    whole = plain(steps_of(build_feed(loader, 1, EVEN, 3), range(1)))
    later = plain(steps_of(build_feed(loader, 1, EVEN, 3), range(1), first=2))
    assert whole[2:] == later, "a worker for whom it is the first share gets the same"
    again = plain(steps_of(build_feed(loader, 1, EVEN, 4), range(1)))
    assert [k for k in range(6) if whole[k] != again[k]] == [2], "another seed changes that share alone"


def test_a_share_that_draws_nothing_is_fetched_and_collated_once() -> None:
    dataset, collated = RarelyMany(8), []
    dataset.asked = []

    def collate(samples: list[Any]) -> Any:
        collated.append(len(samples))
        return samples

    steps_of(build_feed(DataLoader(dataset, batch_size=4, collate_fn=collate), 1, EVEN, 0), range(1))
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7]] and collated == [4, 4]


class Counting(DataLoader[Any]):
    """Its own way to go through its batches."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


def test_a_loaders_own_way_through_its_batches_is_kept() -> None:
    feed, plain_feed = (
        build_feed(kind(Augmented(), batch_size=7, shuffle=True), 3, EVEN, 9) for kind in (Counting, DataLoader)
    )
    assert type(feed) is AheadFeed and type(plain_feed) is MapFeed
    assert plain(steps_of(feed, range(3))) == plain(steps_of(plain_feed, range(3)))
    assert feed._loader.passes == 1  # type: ignore[attr-defined]


class Scaling(DataLoader[Any]):
    """It changes what comes out of it."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield {"x": x * 1000, "y": y}


@pytest.mark.parametrize("make", [numbers, Augmented], ids=["tensors", "general"])
@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_loaders_own_way_makes_of_a_batch_is_trained_whoever_trains_it(make: Any, processes: int) -> None:
    """Also a share that falls to this worker because another has died, and one that is lent."""
    loader = Scaling(make(24), batch_size=8, shuffle=True, num_workers=processes)
    feed = build_feed(loader, 4, EVEN, 9)
    plain_feed = build_feed(DataLoader(make(24), batch_size=8, shuffle=True), 4, EVEN, 9)
    for each in (feed, plain_feed):
        each.start(0, 0, [0, 2])
    for slot in (0, 1, 2, 3):
        ours, theirs = (value(each.share(0, 0, slot)) for each in (feed, plain_feed))
        assert torch.equal(ours["x"], theirs[0] * 1000) and torch.equal(ours["y"], theirs[1])
    lent = feed.stand_in(0, 0)
    assert lent["x"].shape[0] == 1 and torch.equal(lent["y"], plain_feed.stand_in(0, 0)[1])
    feed.stop()


def test_shares_come_in_any_order_and_for_any_slot_whoever_reads_them() -> None:
    """Slots that are dealt anew within a step: some were aimed at, and some are another worker's."""
    feeds = [build_feed(kind(Augmented(), batch_size=8, shuffle=True), 4, EVEN, 9) for kind in (Counting, DataLoader)]
    for feed in feeds:
        feed.start(0, 1, [0, 2])
    for step, slot in [(1, 2), (1, 0), (1, 3), (2, 0), (2, 1), (2, 2)]:
        ahead, direct = (feed.share(0, step, slot) for feed in feeds)
        assert ahead is not None and direct is not None and ahead.ids.tolist() == direct.ids.tolist()
        assert plain(ahead.value) == plain(direct.value)


def test_what_is_fetched_here_is_pinned_where_the_loader_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loader_module, "pinned", lambda value: ("pinned", value))
    loader = DataLoader(Augmented(), batch_size=4, pin_memory=True, collate_fn=lambda samples: [y for _, y in samples])
    feed = build_feed(loader, 1, EVEN, 0)
    feed.start(0, 0, [0])
    assert value(feed.share(0, 0, 0)) == ("pinned", [0, 1, 2, 3])


def test_a_subset_is_a_data_set_like_another() -> None:
    loader = DataLoader(Subset(Augmented(), [3, 5, 7, 9, 11]), batch_size=4, collate_fn=lambda batch: batch)
    feed = build_feed(loader, 2, EVEN, 0)
    assert [[y for _, y in share] for step in steps_of(feed, range(2)) for share in step if share] == [
        [3, 5],
        [7, 9],
        [11],
    ]


def test_a_custom_collate_function_sees_a_share() -> None:
    seen: list[int] = []

    def collate(samples: list[Any]) -> dict[str, Any]:
        seen.append(len(samples))
        return {"ids": [y for _, y in samples], "noise": random.random()}

    feed = build_feed(DataLoader(Augmented(10), batch_size=6, collate_fn=collate), 4, EVEN, 1)
    steps = steps_of(feed, range(4))
    assert [[share["ids"] for share in step if share] for step in steps] == [
        [[0, 1], [2, 3], [4], [5]],
        [[6], [7], [8], [9]],
    ]
    assert seen == [2, 2, 1, 1, 1, 1, 1, 1]
    assert plain(steps_of(feed, range(4))) == plain(steps), "what collate draws is repeatable too"


def test_a_last_batch_smaller_than_the_slots_leaves_some_without() -> None:
    feed = build_feed(DataLoader(Augmented(10), batch_size=8, collate_fn=lambda s: [y for _, y in s]), 4, EVEN, 1)
    assert steps_of(feed, range(4))[1] == [[8], [9], None, None]
    assert steps_of(feed, range(2, 4)) == [[[4, 5], [6, 7]], [None, None]]
    assert feed.stand_in(0, 1) == [8]


@pytest.mark.parametrize("make", [numbers, Augmented], ids=["tensors", "general"])
def test_there_is_a_stand_in_wherever_a_slot_has_nothing(make: Any) -> None:
    """Rows: 6 samples, 2 slots, a batch of 3. Slot 0 takes two a step and is done first; slot 1 has one left."""
    feed = build_feed(DataLoader(make(6), batch_size=3), 2, ROWS, 0)
    assert feed.steps == 3 and feed.sizes(0, 2) == [0, 1]
    share = feed.stand_in(0, 2)
    assert share[1].tolist() == [5]


def test_a_users_sampler_decides_the_order() -> None:
    class Backwards:
        def __len__(self) -> int:
            return 9

        def __iter__(self) -> Iterator[int]:
            yield from range(8, -1, -1)

    feed = build_feed(DataLoader(numbers(9), batch_size=4, sampler=Backwards()), 2, EVEN, 0)
    assert plain([[s[1] for s in step if s] for step in steps_of(feed, range(2))]) == [
        [[8, 7], [6, 5]],
        [[4, 3], [2, 1]],
        [[0]],
    ]


def test_a_random_users_sampler_is_the_same_on_every_worker() -> None:
    def drawn(epoch: int, slots: range) -> Any:
        torch.manual_seed(random.SystemRandom().randrange(1000))
        sampler = WeightedRandomSampler(torch.rand(20, generator=torch.Generator().manual_seed(1)), 12)
        feed = build_feed(DataLoader(numbers(20), batch_size=6, sampler=sampler), 2, EVEN, 5)
        return plain(steps_of(feed, slots, epoch))

    whole = drawn(1, range(2))
    assert [step[:1] for step in whole] == drawn(1, range(1))
    assert whole != drawn(2, range(2))


class Drawing:
    """A sampler with a generator of NumPy's or Python's."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        ids = list(range(20))
        self.generator.shuffle(ids)
        return iter(ids)


def _fresh(seed: int) -> dict[str, dict[str, Any]]:
    """Loaders' arguments, with generators of their own: as a newcomer's script makes them."""
    own = torch.Generator().manual_seed(seed)
    random_batches = BatchSampler(RandomSampler(range(20), generator=own), 4, False)
    return {
        "subset": {"batch_size": 4, "sampler": SubsetRandomSampler(range(20), generator=own)},
        "replacement": {"batch_size": 4, "sampler": RandomSampler(range(20), True, 20, generator=own)},
        "numpy": {"batch_size": 4, "sampler": Drawing(np.random.default_rng(seed))},
        "python": {"batch_size": 4, "sampler": Drawing(random.Random(seed))},
        "older numpy": {"batch_size": 4, "sampler": Drawing(np.random.RandomState(seed))},
        "batches": {"batch_sampler": type("Own", (BatchSampler,), {})(random_batches.sampler, 4, False)},
        "items": {"batch_size": None, "sampler": SubsetRandomSampler(range(20), generator=own)},
    }


@pytest.mark.parametrize("kind", _fresh(0))
def test_a_sampler_with_a_generator_of_its_own_gives_a_newcomer_what_all_have(kind: str) -> None:
    def feed(seed: int) -> Any:
        return build_feed(DataLoader(numbers(20), **_fresh(seed)[kind]), 2, EVEN, 5)

    member, newcomer = feed(7), feed(8)
    epochs = [plain(steps_of(member, range(2), epoch)) for epoch in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"
    assert plain(steps_of(newcomer, range(2), 2)) == epochs[2]
    assert newcomer.order_digest(2) == member.order_digest(2) != 0
    member.order_digest(1)
    assert newcomer.order_digest(1) == member.order_digest(1) != member.order_digest(2)


def test_drawing_an_epoch_leaves_a_generator_as_it_was() -> None:
    own = torch.Generator().manual_seed(3)
    feed = build_feed(
        DataLoader(numbers(20), batch_size=4, sampler=SubsetRandomSampler(range(20), generator=own)), 2, EVEN, 5
    )
    steps_of(feed, range(2))
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_who_evaluates_with_another_generators_state_deals_the_same_batches() -> None:
    dealt = []
    for seed, first in ((1, 0), (2, 1)):  # two workers, one of which came later
        sampler = SubsetRandomSampler(range(20), generator=torch.Generator().manual_seed(seed))
        loader = DataLoader(numbers(20), batch_size=4, sampler=sampler)
        dealt += [int(x) for _, batch in strided(loader, first, 2, 5) for x in batch[1]]
    assert sorted(dealt) == list(range(20))


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 20, 12),
        RandomSampler(range(20), replacement=True, num_samples=12),
        [3, 1, 2],
    ],
    ids=["weighted", "replacement", "list"],
)
def test_a_users_sampler_is_not_silently_dropped_by_rows(sampler: Any) -> None:
    """Rows cut the data set itself: a sampler that means something else cannot be followed."""
    with pytest.raises(UsageError, match="sampler"):
        build_feed(DataLoader(numbers(20), batch_size=4, sampler=sampler), 2, ROWS, 5)


@pytest.mark.parametrize("given", ["sampler", "batches", "own batches"])
def test_a_sampler_that_deals_one_of_several_parts_is_refused(given: str) -> None:
    def loader(replicas: int) -> DataLoader[Any]:
        part = DistributedSampler(numbers(20), num_replicas=replicas, rank=0)
        if given == "sampler":
            return DataLoader(numbers(20), batch_size=4, sampler=part)
        kind = BatchSampler if given == "batches" else type("Own", (BatchSampler,), {})
        return DataLoader(numbers(20), batch_sampler=kind(part, 4, False))

    with pytest.raises(UsageError, match=r"DistributedSampler deals out one part in 2, .* drop the sampler"):
        build_feed(loader(2), 2, EVEN, 0)
    assert build_feed(loader(1), 2, EVEN, 0).steps == 5


def test_a_sampler_without_a_length_is_told_what_to_do() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            yield from range(9)

    with pytest.raises(UsageError, match="__len__"):
        build_feed(DataLoader(numbers(9), batch_size=4, sampler=Endless()), 2, EVEN, 0)


def test_a_batch_sampler_decides_the_batches() -> None:
    batches = [[5, 1], [2, 3, 4, 0], [6]]
    feed = build_feed(DataLoader(numbers(9), batch_sampler=batches), 2, EVEN, 0)
    assert type(feed) is MapFeed and feed.steps == 3
    assert plain([[s and s[1] for s in step] for step in steps_of(feed, range(2))]) == [
        [[5], [1]],
        [[2, 3], [4, 0]],
        [[6], None],
    ]
    assert [feed.sizes(0, step) for step in range(3)] == [[1, 1], [2, 2], [1, 0]]


def test_a_subclass_of_the_batch_sampler_is_followed() -> None:
    class Twice(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            for batch in super().__iter__():
                yield batch + batch

    loader = DataLoader(numbers(4), batch_sampler=Twice(SequentialSampler(range(4)), 2, False))
    feed = build_feed(loader, 2, EVEN, 0)
    assert plain([[s[1] for s in step] for step in steps_of(feed, range(2))]) == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]


def test_batches_whose_number_changes_with_the_epoch_are_all_trained() -> None:
    class Growing:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 2 + self.epoch

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([2 * k, 2 * k + 1] for k in range(len(self)))

    feed = build_feed(DataLoader(numbers(20), batch_sampler=Growing()), 2, EVEN, 0)
    for epoch in (0, 1, 3):
        feed.start(epoch, 0, range(2))
        assert feed.steps == 2 + epoch, "the steps of the epoch that has been started"
        feed.stop()


def test_without_automatic_batching_an_item_is_a_share() -> None:
    feed = build_feed(DataLoader(Augmented(5), batch_size=None, shuffle=True), 2, EVEN, 4)
    assert feed.steps == 3 and feed.batch is None
    assert feed.sizes(0, 0) is None, "how much an item holds is known once it is loaded"
    steps = steps_of(feed, range(2))
    assert steps[2][1] is None
    assert sorted(share[1] for step in steps for share in step if share) == list(range(5))
    assert plain(steps_of(feed, range(1, 2))) == plain([step[1:] for step in steps])
    item = feed.stand_in(0, 2)
    assert item[1] == steps[2][0][1] and item[0].shape == (4,)


# streams


def stream(n: int, batch: int | None, slots: int, **more: Any) -> StreamFeed:
    feed = build_feed(DataLoader(Stream(n), batch_size=batch, **more), slots, EVEN, 6)
    assert isinstance(feed, StreamFeed)
    return feed


def test_items_of_a_stream_are_dealt_to_the_slots_in_turn() -> None:
    feed = stream(11, 2, 3)
    assert feed.steps is None and feed.batch is None
    feed.start(0, 0, range(3))
    got = []
    for step in range(3):
        sizes = feed.sizes(0, step)
        shares = [value(feed.share(0, step, slot)) for slot in range(3)]
        got.append((sizes, [None if s is None else s[:, 0].tolist() for s in shares]))
    feed.stop()
    assert got == [
        ([2, 2, 2], [[0, 1], [2, 3], [4, 5]]),
        ([2, 2, 1], [[6, 7], [8, 9], [10]]),
        ([0, 0, 0], [None, None, None]),
    ]


def test_a_partial_last_step_of_a_stream_has_a_stand_in() -> None:
    feed = stream(4, None, 3)
    feed.start(0, 0, range(3))
    assert feed.sizes(0, 1) is not None
    assert [s is None for s in (feed.share(0, 1, slot) for slot in range(3))] == [False, True, True]
    assert feed.stand_in(0, 1)[0] == 3
    feed.stop()


def test_a_stream_can_be_entered_later_and_draws_the_same() -> None:
    whole = plain(steps_of(stream(10, 1, 2), range(2), epoch=1, steps=5))
    assert plain(steps_of(stream(10, 1, 2), range(2), epoch=1, first=3, steps=5)) == whole[3:]
    assert plain(steps_of(stream(10, 1, 2), range(1, 2), epoch=1, steps=5)) == [step[1:] for step in whole]
    other = plain(steps_of(stream(10, 1, 2), range(2), epoch=2, steps=5))
    assert [s[0][0] for step in other for s in step] == [s[0][0] for step in whole for s in step]
    assert other != whole, "another epoch, other random numbers"


def test_a_stream_through_loader_processes_ends_in_the_middle_of_a_step() -> None:
    feed = stream(3, 1, 4, num_workers=1)
    feed.start(0, 0, range(4))
    assert feed.sizes(0, 0) == [1, 1, 1, 0]
    assert feed.sizes(0, 1) == [0, 0, 0, 0]
    feed.stop()


# refusals


def test_something_else_than_a_loader_is_refused() -> None:
    with pytest.raises(UsageError, match=r"given a list as loader; give a torch DataLoader"):
        build_feed([1, 2, 3], 2, EVEN, 0)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="the data set TensorDataset is empty"):
        build_feed(DataLoader(numbers(0), batch_size=4), 2, EVEN, 0)


def test_a_data_set_without_a_length_is_refused() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return index

    loader = DataLoader(Endless(), batch_size=4, sampler=[1, 2, 3])
    with pytest.raises(UsageError, match=r"Endless has no length: give it __len__"):
        build_feed(loader, 2, EVEN, 0)


def test_a_batch_smaller_than_the_slots_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch of 3 is smaller than the 4 slots.*batch_size to 4.*--slots 3"):
        build_feed(DataLoader(numbers(20), batch_size=3), 4, EVEN, 0)
    with pytest.raises(UsageError, match="at least the 4 slots; it is 3"):
        build_feed(DataLoader(numbers(20), batch_size=3), 4, ROWS, 0)


@pytest.mark.parametrize("split", [EVEN, ROWS], ids=["even", "rows"])
def test_drop_last_that_leaves_nothing_is_refused(split: Split) -> None:
    with pytest.raises(UsageError, match=r"drop_last=True with a batch of 8 leaves no step .* 7 samples"):
        build_feed(DataLoader(numbers(7), batch_size=8, drop_last=True), 2, split, 0)
