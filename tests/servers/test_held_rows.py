"""A fragment of rows at a server: whoever brings what in whatever order, it comes to the same bits, and so does a copy."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.servers.held import Said
from paceline.servers.held_rows import HeldRows
from paceline.servers.messages import Advance, Apply, Lay, Part, RowPush, RowUpdate
from paceline.servers.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
from paceline.servers.tables import Table, distinct, pack
from paceline.state.snapshot import Snapshot

DIM, LEAVES = 3, 5
Spoken = tuple[Said, bytes]


def table(optimizer: RowOptimizer, **options: Any) -> Table:
    return Table(DIM, optimizer, **{"init": 0.1, "admission": 1, "expiry": 0, **options})


def laid(kind: Table, seed: int = 5) -> HeldRows:
    held = HeldRows(0, kind, since=1)
    say(held, (Lay([0], 0), bytes(Snapshot({"seed": seed, "chunks": []}).packed())))
    return held


def say(held: HeldRows, spoken: Spoken) -> None:
    said, body = spoken
    with held.changed:
        if not held.knows(said, memoryview(body)):
            held.do(said, memoryview(body))


def push(count: int, leaf: int, ids: list[int], point: int = 0, gradient: float | None = None) -> Spoken:
    rows = np.random.default_rng([count, leaf, point]).standard_normal((len(ids), DIM)).astype(np.float32)
    if gradient is not None:
        rows[:] = gradient
    touched, _ = distinct(np.array(ids, dtype=np.int64))
    return RowPush(count, point, leaf, [0]), b"".join(pack(touched.ids, rows))


def advance(count: int, optimizer: RowOptimizer, divisors: tuple[float, ...] = (3.0,)) -> Spoken:
    return Advance(count, [0]), msgspec.msgpack.encode(RowUpdate(list(divisors), [optimizer]))


def rows(held: HeldRows, *ids: int) -> list[list[float]]:
    with held.changed:
        return held.gather(memoryview(b"".join(pack(np.array(ids, dtype=np.int64))))).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)])
def test_the_order_in_which_shares_come_and_how_often_is_nothing_to_the_rows(
    optimizer: RowOptimizer, seed: int
) -> None:
    kind, draw = table(optimizer, admission=2, expiry=3), random.Random(seed)
    orderly, drawn = laid(kind), laid(kind)
    copies = []
    for count in range(1, 8):
        shares = [push(count, leaf, draw.sample(range(12), 6), point) for leaf in range(LEAVES) for point in range(2)]
        for spoken in shares:
            say(orderly, spoken)
        for spoken in draw.sample(shares, len(shares)) + draw.sample(shares, 3):
            say(drawn, spoken)
        if count == 4:  # in the middle of a step
            copies = [copy_of(drawn, kind)]
        for spoken in shares if copies else []:
            say(copies[0], spoken)
        for held in [orderly, drawn, drawn, *copies]:
            say(held, advance(count, optimizer, (3.0, 0.5)))
    assert {each.survey(hashed=True).sha256 for each in (orderly, drawn, *copies)} == {orderly.survey(True).sha256}
    assert orderly.version == drawn.version == copies[0].version == 7


def copy_of(held: HeldRows, kind: Table) -> HeldRows:
    copy = HeldRows(0, kind, since=2)
    with held.changed:
        for said, body in held.all_said():
            say(copy, (said, b"".join(body)))
    return copy


def test_a_row_moves_by_the_mean_of_its_shares() -> None:
    held = laid(table(SGD(lr=1.0)))
    (before,) = rows(held, 7)
    for leaf, gradient in enumerate((1.0, 2.0, 6.0)):
        say(held, push(1, leaf, [7, leaf], gradient=gradient))
    say(held, advance(1, SGD(lr=1.0), (3.0,)))
    assert rows(held, 7)[0] == pytest.approx([value - 3.0 for value in before], abs=1e-6)
    assert held.survey(hashed=False).rows == 4


def test_the_values_of_an_optimizer_come_with_each_update() -> None:
    held = laid(table(SGD(lr=1.0)))
    before = rows(held, 1)
    say(held, push(1, 0, [1], gradient=1.0))
    say(held, advance(1, SGD(lr=0.0)))
    assert rows(held, 1) == before


def test_rows_are_admitted_and_expire() -> None:
    held = laid(table(SGD(lr=1.0), admission=2, expiry=4))
    initial = rows(held, 1, 2)
    for count in range(1, 3):
        say(held, push(count, 0, [1] if count == 1 else [1, 2], gradient=1.0))
        say(held, advance(count, SGD(lr=1.0), (1.0,)))
    assert rows(held, 1) != initial[:1] and rows(held, 2) == initial[1:]
    for count in range(3, 9):
        say(held, advance(count, SGD(lr=1.0), (1.0,)))
    assert held.survey(hashed=False).rows == 0 and rows(held, 1) == initial[:1]


@pytest.mark.parametrize(
    ("said", "body", "says"),
    [
        (*advance(3, SGD(lr=1.0)), "row update 3 before 2"),
        (*advance(1, SGD(lr=0.5)), "workers do not agree on row update 1"),
        (Advance(2, [0]), b"abc", "no row update"),
        (Apply(1, [0]), b"", "a Apply of a fragment of rows"),
    ],
)
def test_what_makes_no_sense_is_refused(said: Said, body: bytes, says: str) -> None:
    held = laid(table(SGD(lr=1.0)))
    say(held, advance(1, SGD(lr=1.0)))
    with pytest.raises(ValueError, match=says):
        say(held, (said, body))
    with pytest.raises(ValueError, match="Part of a fragment of rows"):
        held.length(Part(0, 0, 1, 0, 1, [0]), memoryview(b""))
