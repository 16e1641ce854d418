"""Clients' data: every sample belongs to one client, and a round goes through it as often as it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from paceline.data.client_feed import client_feed, clients
from paceline.data.client_folders import ClientFolders
from paceline.data.clients import ClientShares, by_key, dirichlet, iid
from paceline.data.order import Ids
from paceline.data.receipts import digest, digest_of_all
from paceline.errors import UsageError
from paceline.strategies.federation import Federation

seeds = st.integers(0, 1 << 40)


def is_partition(parts: list[Ids], samples: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples)) and all(map(len, parts))


@given(clients=st.integers(1, 20), more=st.integers(0, 300), seed=seeds)
def test_an_even_split_is_a_partition_into_parts_of_like_sizes(clients: int, more: int, seed: int) -> None:
    parts = iid(clients + more, clients, seed)
    assert is_partition(parts, clients + more)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, iid(clients + more, clients, seed), strict=True))


@given(
    labels=st.lists(st.integers(0, 9), min_size=20, max_size=300),
    clients=st.integers(1, 20),
    alpha=st.floats(0.01, 100),
    seed=seeds,
)
def test_a_dirichlet_split_is_a_partition_in_which_everybody_has_something(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    parts = dirichlet(np.array(labels), clients, alpha, seed)
    assert is_partition(parts, len(labels))
    assert all(
        np.array_equal(a, b) for a, b in zip(parts, dirichlet(np.array(labels), clients, alpha, seed), strict=True)
    )


def test_a_small_alpha_gives_clients_few_labels_and_a_large_one_all_alike() -> None:
    labels = np.repeat(np.arange(10), 600)

    def most(alpha: float) -> float:
        """How much of a client's data has its commonest label, in the mean."""
        parts = dirichlet(labels, 20, alpha, seed=3)
        return float(np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]))

    assert most(1000) < 0.15 < 0.35 < most(0.3) < most(0.03)


@given(keys=st.lists(st.sampled_from(["anna", "ben", "cy"]), min_size=1, max_size=40))
def test_a_key_is_a_client(keys: list[str]) -> None:
    parts = by_key(np.array(keys))
    assert is_partition(parts, len(keys))
    assert [{keys[k] for k in part} for part in parts] == [{key} for key in sorted(set(keys))]


shapes = st.fixed_dictionaries(
    {"sizes": st.lists(st.integers(1, 40), min_size=1, max_size=5), "batch": st.integers(1, 12), "seed": seeds}
)


def taken(shares: ClientShares, number: int, client: int) -> list[Ids]:
    return [shares.ids(number, step, client) for step in range(shares.batches[client])]


def parts_of(sizes: list[int]) -> list[Ids]:
    edges = np.cumsum([0, *sizes])
    return [np.arange(first, last) for first, last in zip(edges, edges[1:], strict=False)]


@given(shape=shapes, epochs=st.integers(1, 3), number=st.integers(0, 100), shuffle=st.booleans())
def test_a_client_goes_through_its_data_as_often_as_a_round_has_epochs(
    shape: dict[str, object], epochs: int, number: int, shuffle: bool
) -> None:
    parts = parts_of(shape["sizes"])  # type: ignore[arg-type]
    shares = ClientShares(parts, shape["batch"], shape["seed"], epochs, shuffle=shuffle)  # type: ignore[arg-type]
    for client, part in enumerate(parts):
        batches = taken(shares, number, client)
        assert np.array_equal(np.sort(np.concatenate(batches)), np.sort(np.tile(part, epochs)))
        assert [shares.sizes(number, step)[client] for step in range(len(batches))] == list(map(len, batches))
        assert shares.sizes(number, len(batches))[client] == 0
        if not shuffle:
            assert np.array_equal(np.concatenate(batches), np.tile(part, epochs))


@given(shape=shapes, steps=st.integers(1, 30))
def test_or_so_many_batches_whatever_it_has(shape: dict[str, object], steps: int) -> None:
    parts = parts_of(shape["sizes"])  # type: ignore[arg-type]
    shares = ClientShares(parts, shape["batch"], shape["seed"], steps=steps)  # type: ignore[arg-type]
    for client, part in enumerate(parts):
        batches = taken(shares, 0, client)
        assert len(batches) == steps
        counts = np.unique(np.concatenate(batches), return_counts=True)[1]
        assert counts.max() - counts.min() <= 1 or len(counts) < len(part)


def test_each_round_and_each_time_has_an_order_of_its_own() -> None:
    shares = ClientShares([np.arange(50), np.arange(50, 100)], 50, seed=1, epochs=2)
    orders = [tuple(ids % 50) for number in (0, 1) for client in (0, 1) for ids in taken(shares, number, client)]
    assert len(set(orders)) == len(orders) == 8


def test_a_short_last_batch_is_left_out_unless_it_is_the_only_one() -> None:
    shares = ClientShares([np.arange(9), np.arange(9, 12)], 4, seed=1, drop_last=True)
    assert [list(map(len, taken(shares, 0, client))) for client in (0, 1)] == [[4, 4], [3]]
    assert shares.sizes_of == [8, 3]


# from a loader


def data(samples: int = 30) -> TensorDataset:
    return TensorDataset(torch.arange(samples).float(), torch.arange(samples) % 3)


class Named(Dataset[int]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> int:
        return number


def loader_over(dataset: Dataset[object], **options: object) -> DataLoader[object]:
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True} | options)  # type: ignore[arg-type]


def test_a_loader_becomes_the_batches_of_its_clients() -> None:
    feed, shares = client_feed(loader_over(data()), Federation(clients=3, epochs=1), seed=5)
    feed.follow(7, ((step, client) for client in range(3) for step in range(shares.batches[client])))
    ids = []
    for client in range(3):
        for step in range(shares.batches[client]):
            share = feed.share(7, step, client)
            assert share is not None
            assert share.value[0].tolist() == share.ids.tolist()
            ids.append(share.ids)
    assert digest(np.concatenate(ids)) == digest_of_all(30)
    assert feed.dealing.words == "3 clients of 10 samples, batches of 4"


def test_labels_are_found_where_torch_has_them_or_where_they_are_said() -> None:
    plan = Federation(clients=2, alpha=0.01)
    half = Subset(data(), range(0, 30, 2))
    targets = Named()
    targets.targets = [number % 3 for number in range(30)]  # type: ignore[attr-defined]
    said = clients(loader_over(Named()), labels=lambda number: number % 3)
    for loader, samples in ((loader_over(half), 15), (loader_over(targets), 30), (said, 30)):
        _, shares = client_feed(loader, plan, seed=1)
        assert is_partition(shares.clients, samples)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the labels of a Named are not known"):
        client_feed(loader_over(Named()), plan, seed=1)


def test_a_partition_by_key_needs_no_number_of_clients() -> None:
    loader = clients(loader_over(data()), by=[number // 10 for number in range(30)])
    _, shares = client_feed(loader, Federation(), seed=1)
    assert [part.tolist() for part in shares.clients if part is not None] == [
        list(range(k, k + 10)) for k in (0, 10, 20)
    ]
    with pytest.raises(UsageError, match="have 3 keys; leave clients out"):
        client_feed(loader, Federation(clients=4), seed=1)
    with pytest.raises(UsageError, match=r"\(2,\) values for 30 samples"):
        client_feed(clients(loader_over(data()), by=[1, 2]), Federation(), seed=1)


def test_a_client_with_a_folder_of_its_own_is_here_or_elsewhere(tmp_path: Path) -> None:
    for client in (1, 2):
        (tmp_path / str(client)).mkdir()
    (tmp_path / "notes").mkdir()
    folders = ClientFolders(tmp_path, open=lambda folder: [f"{folder.name}:{k}" for k in range(int(folder.name) + 4)])
    feed, shares = client_feed(loader_over(folders, shuffle=False), Federation(clients=4), seed=1)
    assert shares.here == [1, 2] and shares.batches == [0, 2, 2, 0] and len(folders) == 11
    feed.follow(0, [(0, 2), (1, 2)])
    second = feed.share(0, 1, 2)
    assert second is not None and second.value == ["2:4", "2:5"]
    assert feed.share(0, 0, 0) is None
    assert feed.dealing.words == "4 clients of 5 to 6 samples, 2 of them elsewhere, batches of 4"
    with pytest.raises(UsageError, match="there is a folder for client 2"):
        client_feed(loader_over(folders), Federation(clients=2), seed=1)
    with pytest.raises(UsageError, match="there is no client in"):
        ClientFolders(tmp_path / "notes", open=len)


@pytest.mark.parametrize(
    ("loader", "plan", "says"),
    [
        (loader_over(data()), Federation(), "say how many clients"),
        (loader_over(data()), Federation(clients=31), "30 samples are too few for 31 clients"),
        (loader_over(data()), Federation(clients=3, sample=4), "sample=4 of 3 clients"),
        (
            loader_over(data(), shuffle=False, sampler=WeightedRandomSampler([1.0] * 30, 30)),
            Federation(clients=3),
            "can have no sampler of its own",
        ),
        (loader_over(data(), batch_size=None, shuffle=False), Federation(clients=3), "no sampler of its own"),
        ([1, 2, 3], Federation(clients=3), "give a DataLoader over a map-style set"),
    ],
)
def test_what_cannot_be_dealt_is_refused(loader: object, plan: Federation, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        client_feed(loader, plan, seed=1)


def test_one_of_keys_and_labels_is_said() -> None:
    with pytest.raises(UsageError, match="say one of them"):
        clients(loader_over(data()))
