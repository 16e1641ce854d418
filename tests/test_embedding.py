"""SparseEmbedding as a module: before there are servers, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.embedding import SparseEmbedding, tables_of
from paceline.errors import UsageError


def test_a_row_is_a_function_of_the_seed_and_the_id() -> None:
    torch.manual_seed(1)
    one, other = SparseEmbedding(6), SparseEmbedding(6)
    ids = torch.tensor([[3, -(1 << 63), 3], [(1 << 63) - 1, 0, 1]])
    assert one(ids).shape == (2, 3, 6) and torch.equal(one(ids)[0, 0], one(ids)[0, 2])
    assert not torch.equal(one(ids), other(ids)), "each table begins otherwise"
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(ids), other(ids)) and torch.equal(copy.deepcopy(one)(ids), one(ids))
    assert one(ids).abs().max() <= 0.01 and SparseEmbedding(6, init=0.0)(ids).abs().max() == 0


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_pooling_is_that_of_torch(mode: Any) -> None:
    pooled, plain = SparseEmbedding(4, pooling=mode), SparseEmbedding(4)
    plain.load_state_dict(pooled.state_dict())
    ids = torch.tensor([5, 9, 5, 7, 2, 2])
    want = plain(ids).reshape(2, 3, 4)
    assert torch.allclose(pooled(ids.reshape(2, 3)), getattr(want, mode)(1))
    bags = nn.functional.embedding_bag(torch.arange(6), plain(ids), torch.tensor([0, 1]), mode=mode)
    assert torch.allclose(pooled(ids, offsets=torch.tensor([0, 1])), bags)


def test_every_table_of_a_model_is_found_once() -> None:
    shared = paceline.SparseEmbedding(2)
    model = nn.ModuleList([shared, nn.Sequential(shared, SparseEmbedding(3)), nn.Linear(1, 1)])
    assert [table.dim for table in tables_of([model, nn.Sequential(shared)])] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"optimizer": "lion"}, "there are sgd, momentum, adagrad, adam"),
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "takes lr, weight_decay, not betas"),
        ({"optimizer": "momentum"}, "momentum"),
        ({"lr": "fast"}, "Expected `float`"),
        ({"pooling": "max"}, 'pooling is "sum", "mean" or None'),
        ({"admission": 0}, "at least 1"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SparseEmbedding(4, **arguments)


def test_ids_must_be_integers() -> None:
    with pytest.raises(UsageError, match="integers"):
        SparseEmbedding(4)(torch.tensor([1.0]))


@pytest.mark.parametrize("shape", [(3, 0), (0, 2), (2, 3, 0)])
def test_bags_without_ids_are_zeros(shape: tuple[int, ...]) -> None:
    """A feature that a batch lacks."""
    pooled = SparseEmbedding(4, pooling="sum")
    found = pooled(torch.zeros(shape, dtype=torch.int64))
    assert found.shape == (*shape[:-1], 4) and not found.any()
