"""A user's loader seen through the run, its batches on the device, and its batches dealt out for evaluation."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.copies import strided
from paceline.data.loader import adopt, adopted, build_feed
from paceline.data.values import leading_size, pinned, place
from tests.data.loaders import CPU, EVEN, Augmented, Stream, numbers, plain, steps_of

# adoption


class Own(DataLoader[Any]):
    """A subclass with something of its own."""

    def hello(self) -> str:
        return f"hello from {self.mood}"


def test_an_adopted_loader_is_the_same_object_seen_through_the_run() -> None:
    loader = Own(numbers(10), batch_size=4, num_workers=0)
    loader.mood = "the user"
    alias, dataset = loader, loader.dataset
    assert not adopted(loader)
    adopt(loader, lambda: iter(["a", "b"]), lambda: 2)
    assert adopted(loader)
    assert alias is loader and isinstance(loader, Own) and isinstance(loader, DataLoader)
    assert type(loader).__name__ == "Own" and type(loader).__module__ == __name__
    assert loader.dataset is dataset and loader.batch_size == 4 and loader.hello() == "hello from the user"
    assert list(loader) == ["a", "b"] and len(loader) == 2
    assert len(Own(numbers(10), batch_size=4)) == 3, "other loaders of the class are not touched"
    loader.mood = "changed"
    assert loader.hello() == "hello from changed"


def test_two_adopted_loaders_do_not_share_a_view() -> None:
    one, two = DataLoader(numbers(4)), DataLoader(numbers(4))
    adopt(one, lambda: iter([1]), lambda: 1)
    adopt(two, lambda: iter([2, 2]), lambda: 2)
    assert (list(one), len(one), list(two), len(two)) == ([1], 1, [2, 2], 2)


def test_a_feed_outlives_the_adoption_of_its_loader() -> None:
    loader = Own(Augmented(6), batch_size=4)
    feed = build_feed(loader, 2, EVEN, 0)
    adopt(loader, lambda: iter([]), lambda: 0)
    assert [[len(s[1]) if s else 0 for s in step] for step in steps_of(feed, range(2))] == [[2, 2], [1, 1]]


# batches on the device


def test_place_aligns_every_tensor_to_64_bytes() -> None:
    base = torch.arange(200.0)
    assert base.data_ptr() % 64 == 0
    odd = base[3:40]
    assert odd.data_ptr() % 64
    pair = namedtuple("pair", "x y")
    value = {"a": [odd, base[1:2]], "b": (odd, "text", 7, None), "c": pair(odd, odd.view(1, 37).t())}
    placed = place(value, CPU)
    flat = [*placed["a"], placed["b"][0], *placed["c"]]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in flat)
    assert torch.equal(placed["a"][0], odd) and torch.equal(placed["c"].y, odd.view(1, 37).t())
    assert placed["b"][1:] == ("text", 7, None)
    assert type(placed["c"]) is pair and type(placed["b"]) is tuple and type(placed["a"]) is list


def test_large_tensors_are_pinned_wherever_a_batch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    large, small = torch.zeros(1 << 15), torch.zeros(1 << 14)
    pair = namedtuple("pair", "x y")
    value = pinned([(large, small), {"a": large}, pair(large, "text"), 7])
    assert [type(item) for item in value] == [tuple, dict, pair, int]
    assert value[0][0].all() and value[1]["a"].all() and value[2].x.all() and value[2].y == "text"
    assert value[0][1] is small, "a GPU takes it as it is"


def test_place_does_not_copy_what_is_aligned() -> None:
    base = torch.arange(64.0)
    assert place([base], CPU)[0] is base
    assert place(torch.empty(0), CPU).shape == (0,)


@pytest.mark.parametrize(
    "value",
    [OrderedDict(x=torch.ones(2)), defaultdict(list, x=torch.ones(2))],
    ids=lambda value: type(value).__name__,
)
def test_place_keeps_kinds_of_dicts(value: Any) -> None:
    placed = place(value, CPU)
    assert type(placed) is type(value) and plain(dict(placed)) == plain(dict(value))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(3.0), 1),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"x": torch.zeros(3, 1), "y": torch.zeros(3)}, 3),
        (({"x": [torch.zeros(6)]},), 6),
        ("text", 1),
        ([], 1),
        ((["a", "b", "c"], torch.zeros(3)), 3),  # default_collate of (text, label) pairs
        ({"name": ["a", "b"], "x": torch.zeros(2, 4)}, 2),
    ],
)
def test_the_size_of_a_batch_is_its_first_tensors_length(batch: Any, size: int) -> None:
    assert leading_size(batch) == size


# evaluation


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_strides_cover_each_batch_once(stride: int, workers: int) -> None:
    loader = DataLoader(numbers(11), batch_size=3, num_workers=workers)
    whole = [plain(batch) for batch in DataLoader(numbers(11), batch_size=3)]
    got = {}
    for first in range(stride if not workers else min(stride, 2)):
        mine = list(strided(loader, first, stride, 3))
        assert [number for number, _ in mine] == list(range(first, 4, stride))
        got.update({number: plain(batch) for number, batch in mine})
    assert all(whole[number] == batch for number, batch in got.items())
    if not workers:
        assert sorted(got) == [0, 1, 2, 3]


@pytest.mark.parametrize("first", [0, 1])
def test_strides_over_streams_items_and_given_batches(first: int) -> None:
    want = list(range(first, 5, 2))
    streamed = list(strided(DataLoader(Stream(9), batch_size=2), first, 2, 3))
    assert [(n, b[:, 0].tolist()) for n, b in streamed] == [(n, list(range(2 * n, min(2 * n + 2, 9)))) for n in want]
    items = list(strided(DataLoader(numbers(5), batch_size=None), first, 2, 3))
    assert [(n, int(item[1])) for n, item in items] == [(n, n) for n in want]
    given = list(strided(DataLoader(numbers(5), batch_sampler=[[k, 4 - k] for k in range(5)]), first, 2, 3))
    assert [(n, b[1].tolist()) for n, b in given] == [(n, [n, 4 - n]) for n in want]


def test_strides_see_through_an_adopted_loader_and_leave_it_as_it_is() -> None:
    loader = DataLoader(numbers(6), batch_size=2)
    adopt(loader, lambda: iter(["the run's"]), lambda: 1)
    assert [number for number, _ in strided(loader, 0, 1, 3)] == [0, 1, 2]
    assert list(loader) == ["the run's"]
    assert type(loader.batch_sampler) is BatchSampler
