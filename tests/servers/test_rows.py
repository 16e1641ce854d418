"""A table of rows, against a dict that goes one id at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MismatchError
from paceline.servers import row_optimizers
from paceline.servers.row_optimizers import SGD, SPARE, Adagrad, Adam, Momentum, RowOptimizer
from paceline.servers.rows import PLACES, Rows, coalesce, places
from paceline.tensors.snapshot import Snapshot

OPTIMIZERS: list[RowOptimizer] = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.3),
    Momentum(lr=0.1, momentum=0.9),
    Momentum(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, eps=1e-3, initial_accumulator_value=0.1, weight_decay=0.2),
    Adam(lr=0.1),
    Adam(lr=0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.1),
]


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def random_rows(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


@dataclass
class Model:
    """What a table means: one id after the other, each row by itself."""

    dim: int
    admit: int
    rows: dict[int, list[np.ndarray]] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)

    def update(self, table: Rows, one: int, gradient: np.ndarray, optimizer: RowOptimizer, now: int) -> None:
        self.touched[one] = now
        if one not in self.rows:
            self.seen[one] = self.seen.get(one, 0) + 1
            if self.seen[one] < self.admit:
                return
            del self.seen[one]
            states = [np.full((1, self.dim), optimizer.begin(name), dtype=np.float32) for name in optimizer.states]
            self.rows[one], self.count[one] = [table.initial(array([one])), *states], 0
        self.count[one] += 1
        spare = [np.empty((1, self.dim), dtype=np.float32) for _ in range(SPARE)]
        value, *states = self.rows[one]
        count = np.array([self.count[one]], dtype=np.int32)
        row_optimizers.step(optimizer, value, states, count, gradient[None].copy(), spare)

    def expire(self, now: int, after: int) -> int:
        before = len(self.rows)
        for one in [one for one, last in self.touched.items() if last < now - after]:
            for what in (self.rows, self.count, self.seen, self.touched):
                what.pop(one, None)
        return before - len(self.rows)


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 30), unique=True, max_size=12), st.booleans()), max_size=10)


@given(STEPS, st.sampled_from(OPTIMIZERS), st.integers(1, 3), st.sampled_from([1, 3, 64]), st.integers(0, 99))
def test_a_table_is_a_dict_of_rows(
    steps: list[tuple[list[int], bool]], optimizer: RowOptimizer, admit: int, dim: int, seed: int
) -> None:
    table, model = Rows(dim, optimizer, seed, admit=admit), Model(dim, admit)
    everything = array([*range(31)])
    for now, (ids, expire) in enumerate(steps):
        optimizer = msgspec.structs.replace(optimizer, lr=optimizer.lr * 0.9)
        gradients = random_rows(len(ids), dim, seed + now)
        table.update(array(ids), gradients, optimizer, now)
        for one, gradient in zip(ids, gradients, strict=True):
            model.update(table, one, gradient, optimizer, now)
        if expire:
            assert table.expire(now, 2) == model.expire(now, 2)
        assert len(table) == len(model.rows)
        want = [model.rows[one][0][0] if one in model.rows else table.initial(array([one]))[0] for one in range(31)]
        assert table.gather(everything).tobytes() == np.stack(want).tobytes()


def equal(one: Rows, other: Rows) -> bool:
    """Whatever the order in which their rows lie."""

    def all_of(table: Rows) -> list[dict[str, bytes]]:
        chunks = [{name: tensor.numpy() for name, tensor in chunk.items()} for chunk in table.chunks()]
        return sorted(
            (
                {name: values[k].tobytes() for name, values in chunk.items()}
                for chunk in chunks
                for k in range(len(chunk["ids"]))
            ),
            key=lambda row: (row["ids"], len(row)),
        )

    return all_of(one) == all_of(other)


@given(
    st.lists(st.lists(st.integers(0, 60), unique=True, max_size=30), min_size=4, max_size=12),
    st.sampled_from([SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)]),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_a_backup_is_filled_while_updates_go_on(
    steps: list[list[int]], optimizer: RowOptimizer, admit: int, rows: int
) -> None:
    """After the first half of the steps it gets a chunk before each of the others, and these others themselves."""
    primary, backup = Rows(4, optimizer, admit=admit), Rows(4, optimizer, admit=admit)
    chunks = None
    for now, ids in enumerate(steps):
        if now == len(steps) // 2:
            chunks = primary.chunks(rows=rows)
        if chunks is not None and (chunk := next(chunks, None)) is not None:
            backup.restore(Snapshot.read(memoryview(Snapshot(chunk).packed())).tree)
        gradients = random_rows(len(ids), 4, now)
        primary.update(array(ids), gradients, optimizer, now)
        if chunks is not None:
            backup.update(array(ids), gradients, optimizer, now)
            assert primary.expire(now, 6) >= 0 and backup.expire(now, 6) >= 0
    assert chunks is not None
    for chunk in chunks:
        backup.restore(chunk)
    assert equal(primary, backup)


def test_a_table_grows_between_two_chunks_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Adam(lr=0.1)
    table, backup = Rows(4, optimizer), Rows(4, optimizer)
    table.update(np.arange(1000), random_rows(1000, 4, 0), optimizer, 0)
    chunks = table.chunks(rows=400)
    backup.restore(next(chunks))
    with monkeypatch.context() as patch:
        patch.setattr("paceline.servers.index._fresh", None)
        for each in (table, backup):
            each.update(np.arange(500, 20_000), random_rows(19_500, 4, 1), optimizer, 1)
    for chunk in chunks:
        backup.restore(chunk)
    assert equal(table, backup)


def test_a_range_of_places_moves_to_another_server() -> None:
    optimizer = Adam(lr=0.1)
    whole, left, right = (Rows(8, optimizer, seed=3, admit=2) for _ in range(3))
    ids, middle = np.arange(5000) * 1_000_003, PLACES // 3
    for now in range(4):
        some = ids[now * 500 : 3000 + now * 500]
        gradients = random_rows(len(some), 8, now)
        for table in (whole, left):
            table.update(some, gradients, optimizer, now)
    for chunk in left.chunks(middle, PLACES, rows=700):
        assert len(chunk["ids"]) <= 700
        right.restore(chunk)
    left.drop(middle, PLACES)
    assert len(left) + len(right) == len(whole) and len(left) / len(whole) == pytest.approx(1 / 3, abs=0.05)
    gradients = random_rows(len(ids), 8, 9)
    here = places(ids) < middle
    whole.update(ids, gradients, optimizer, 9)
    left.update(ids[here], gradients[here], optimizer, 9)
    right.update(ids[~here], gradients[~here], optimizer, 9)
    for chunk in right.chunks():
        left.restore(chunk)
    assert equal(left, whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_rows_move_as_torchs_optimizers_move_them(optimizer: RowOptimizer) -> None:
    options = msgspec.structs.asdict(optimizer)
    kind = {Momentum: torch.optim.SGD}.get(type(optimizer)) or getattr(torch.optim, type(optimizer).__name__)
    table, ids = Rows(16, optimizer, scale=1.0), np.arange(100)
    weight = torch.nn.Parameter(torch.from_numpy(table.gather(ids)))
    theirs = kind([weight], **options)
    for now in range(5):
        gradients = random_rows(100, 16, now)
        table.update(ids, gradients, optimizer, now)
        weight.grad = torch.from_numpy(gradients)
        theirs.step()
    torch.testing.assert_close(torch.from_numpy(table.gather(ids)), weight.detach(), rtol=1e-5, atol=1e-6)


def test_initial_values_are_a_function_of_seed_and_id() -> None:
    table = Rows(64, SGD(lr=1.0), seed=5, scale=0.5)
    ids = np.concatenate((np.arange(2000), np.array([-1, 1 << 62, -(1 << 63)])))
    rows = table.gather(ids)
    assert len(table) == 0, "reading begins no row"
    assert (Rows(64, Adam(lr=1.0), seed=5, scale=0.5).gather(ids[::-1]) == rows[::-1]).all()
    assert (Rows(33, SGD(lr=1.0), seed=5, scale=0.5).gather(ids) == rows[:, :33]).all()
    assert (Rows(64, SGD(lr=1.0), seed=6, scale=0.5).gather(ids) != rows).mean() > 0.999
    assert -0.5 <= rows.min() < -0.499 and 0.499 < rows.max() < 0.5
    assert abs(rows.mean()) < 0.004 and rows.std() == pytest.approx(0.5 / 3**0.5, rel=0.01)
    assert len(np.unique(rows[:, 0])) > 1990
    assert not Rows(4, SGD(lr=1.0), scale=0.0).gather(ids).any()


def test_memory_follows_the_rows_touched_and_is_used_again() -> None:
    optimizer = Adagrad(lr=0.1)
    table = Rows(64, optimizer)
    rng = np.random.default_rng(0)
    for now in range(30):
        ids = np.unique(rng.integers(0, 10**8, 5000))
        table.update(ids, np.ones((len(ids), 64), dtype=np.float32), optimizer, now)
        assert table.nbytes <= 1.2 * len(table) * (256 + 256)
    full = table.nbytes
    for now in range(30, 90):
        table.expire(now, 20)
        ids = np.unique(rng.integers(0, 10**8, 5000))
        table.update(ids, np.ones((len(ids), 64), dtype=np.float32), optimizer, now)
    assert table.nbytes == pytest.approx(full, rel=0.05)


def test_rows_that_are_seen_once_cost_little() -> None:
    optimizer = Adagrad(lr=0.1)
    table = Rows(64, optimizer, admit=2)
    ids = np.arange(100_000)
    table.update(ids, np.ones((100_000, 64), dtype=np.float32), optimizer, 0)
    assert len(table) == 0 and table.nbytes < 40 * 100_000
    table.update(ids[:10], np.ones((10, 64), dtype=np.float32), optimizer, 1)
    assert len(table) == 10


@given(st.lists(st.integers(-5, 5) | st.just(1 << 62), max_size=40), st.integers(1, 70))
def test_coalescing_adds_the_gradients_of_equal_ids(ids: list[int], dim: int) -> None:
    gradients = random_rows(len(ids), dim, len(ids))
    distinct, sums = coalesce(array(ids), gradients)
    assert distinct.tolist() == sorted(set(ids))
    for one, total in zip(distinct.tolist(), sums, strict=True):
        want = np.zeros(dim, dtype=np.float32)
        for other, gradient in zip(ids, gradients, strict=True):
            want = want + gradient if other == one else want
        assert total.tobytes() == want.tobytes()


@pytest.mark.parametrize("ids", [[7, 7], [100, 100], [7, 100, 8, 100], [7, 8, 7]])
def test_an_update_with_an_id_twice_is_refused_and_changes_nothing(ids: list[int]) -> None:
    optimizer = Adagrad(lr=0.1)
    table, other = Rows(4, optimizer), Rows(4, optimizer)
    for each in (table, other):
        each.update(np.arange(20), np.ones((20, 4), dtype=np.float32), optimizer, 1)
    with pytest.raises(MismatchError, match="twice"):
        table.update(array(ids), np.ones((len(ids), 4), dtype=np.float32), optimizer, 2)
    assert equal(table, other)


def test_an_update_of_another_shape_or_kind_is_refused() -> None:
    table = Rows(4, SGD(lr=0.1))
    with pytest.raises(MismatchError, match=r"SGD gradients of shape \(2, 4\)"):
        table.update(array([1, 2]), np.ones((2, 5), dtype=np.float32), SGD(lr=0.1), 0)
    with pytest.raises(MismatchError, match="Adam"):
        table.update(array([1, 2]), np.ones((2, 4), dtype=np.float32), Adam(lr=0.1), 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_row_optimizers_travel_as_messages(optimizer: RowOptimizer) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(optimizer), type=RowOptimizer) == optimizer
