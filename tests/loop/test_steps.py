"""The batch in hand: what each share weighs, and how it is cut finer."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.loader import build_feed
from paceline.data.pieces import NOTHING, cut
from paceline.data.values import map_tensors
from paceline.loop.steps import Batch
from paceline.loop.timing import TimeSplit
from tests.data.loaders import CPU, EVEN, Augmented, Stream, numbers, own_collate, plain, value


def weights(sizes: list[int]) -> list[float]:
    feed: Any = SimpleNamespace(sizes=lambda epoch, step: sizes)
    batch = Batch(SimpleNamespace(), feed, 0, 0, 0)  # type: ignore[arg-type]
    return [batch.weight(slot, None) for slot in range(len(sizes))]


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1], [7, 7]])
def test_shares_that_are_alike_weigh_one_each(sizes: list[int]) -> None:
    assert weights(sizes) == [1.0] * len(sizes)


@pytest.mark.parametrize("sizes", [[4, 4, 3], [2, 1, 1, 0], [1, 3, 8]])
def test_shares_that_differ_weigh_their_samples(sizes: list[int]) -> None:
    assert weights(sizes) == [float(size) for size in sizes]


@pytest.mark.parametrize("sizes", [[2, 4, 4, 2], [3, 1, 3], [5, 0, 5]])
def test_shares_that_differ_in_the_middle_weigh_their_samples_too(sizes: list[int]) -> None:
    """--split 1,2,2,1 gives such sizes, and so does a stream of uneven items."""
    assert weights(sizes) == [float(size) for size in sizes]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(numbers(5), batch_size=4),
        DataLoader(numbers(5), batch_size=4, collate_fn=own_collate),
        DataLoader(Augmented(5), batch_size=4),
        DataLoader(numbers(5), batch_size=None),
        DataLoader(Stream(5), batch_size=None),
    ],
    ids=["tensors", "general", "augmented", "items", "stream"],
)
def test_a_slot_without_a_sample_is_lent_a_copy_of_anothers(loader: DataLoader[Any]) -> None:
    """Five samples over four slots: in the second step only slot 0 has one."""
    feed = build_feed(loader, 4, EVEN, 0)
    feed.start(0, 1, range(3, 4))
    stepper: Any = SimpleNamespace(mine=range(3, 4), device=CPU)
    batch = Batch(stepper, feed, 0, 0, 1)
    before = plain(value(feed.share(0, 1, 0)))
    lent = batch.offered()
    map_tensors(lent, lambda tensor: tensor.zero_().sub_(1))
    assert plain(lent) != before and plain(value(feed.share(0, 1, 0))) == before
    assert batch.taken(3) == NOTHING, "what is lent is not counted"
    feed.stop()


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(7),
        [torch.arange(7), torch.arange(14).view(7, 2)],
        (torch.arange(7), {"a": torch.arange(7)}),
        Pair(torch.arange(7), torch.arange(7)),
    ],
    ids=["tensor", "list", "nested", "namedtuple"],
)
def test_pieces_of_a_batch_are_the_batch(batch: Any) -> None:
    pieces = [cut(batch, piece, 3) for piece in range(3)]
    assert all(type(piece) is type(batch) for piece in pieces)

    def leaves(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in leaves(item)]

    for index, whole in enumerate(leaves(batch)):
        parts = [leaves(piece)[index] for piece in pieces]
        assert torch.equal(torch.cat(parts), whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_text_is_cut_like_the_tensors_beside_it() -> None:
    """default_collate of (text, label) pairs gives a list or tuple of strings beside a tensor."""
    batch = (["a", "b", "c", "d"], torch.arange(4))
    text, labels = cut(batch, 1, 2)
    assert labels.tolist() == [2, 3] and list(text) == ["c", "d"]


def test_a_number_beside_the_tensors_is_left_alone() -> None:
    assert cut((torch.arange(4), torch.tensor(5), 3), 0, 2)[1:] == (torch.tensor(5), 3)


def test_compute_is_what_is_left_of_the_time() -> None:
    assert TimeSplit(data=1.0, communication=2.0, wait=0.5, total=5.0).as_dict() == {
        "data": 1.0,
        "compute": 1.5,
        "communication": 2.0,
        "wait": 0.5,
    }
    assert TimeSplit(data=1.0, total=0.5).as_dict()["compute"] == 0.0
