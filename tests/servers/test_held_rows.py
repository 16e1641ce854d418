"""A fragment of rows at a server: whoever brings what in whatever order, it comes to the same bits, and so does a copy."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.held import Said
from paceline.servers.held_rows import HeldRows
from paceline.servers.messages import Advance, Apply, Lay, Part, RowPush, RowUpdate
from paceline.servers.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
from paceline.servers.tables import Table, distinct, pack
from paceline.tensors.snapshot import Snapshot

DIM, LEAVES = 3, 5
Spoken = tuple[Said, bytes]


def table(optimizer: RowOptimizer, **options: Any) -> Table:
    return Table(DIM, optimizer, **{"init": 0.1, "admission": 1, "expiry": 0, **options})


def laid(kind: Table, seed: int = 5) -> HeldRows:
    held = HeldRows(0, kind, since=1)
    lay(held, seed)
    return held


def lay(held: HeldRows, seed: int = 5) -> None:
    say(held, (Lay([0], 0), bytes(Snapshot({"seed": seed, "chunks": [], "staleness": {}}).packed())))


def say(held: HeldRows, spoken: Spoken) -> None:
    said, body = spoken
    with held.changed:
        if not held.knows(said, memoryview(body)):
            held.do(said, memoryview(body))


def push(
    count: int, leaf: int, ids: list[int], point: int = 0, gradient: float | None = None, behind: int | None = None
) -> Spoken:
    rows = np.random.default_rng([count, leaf, point]).standard_normal((len(ids), DIM)).astype(np.float32)
    if gradient is not None:
        rows[:] = gradient
    touched, _ = distinct(np.array(ids, dtype=np.int64))
    missed = {} if behind is None else {0: behind}
    return RowPush(count, point, leaf, [0], missed), b"".join(pack(touched.ids, rows))


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


KIND = table(Adagrad(lr=0.1), expiry=3)


@given(st.lists(st.sampled_from(["share", "again", "advance", "settle", "fill", "promote"]), max_size=40), st.data())
def test_updates_that_are_taken_in_later_come_to_the_same_rows_at_every_copy(
    deeds: list[str], data: st.DataObject
) -> None:
    """Against one that takes each in at once. A copy is filled, and takes over, with updates still to be taken in."""
    due: list[HeldRows] = []

    def fresh() -> HeldRows:
        return HeldRows(0, KIND, since=1, most=2, later=due.append)

    at_once, primary, backup, said = laid(KIND), fresh(), fresh(), 0
    lay(primary)
    lay(backup)
    shares: list[Spoken] = []
    counted = 0

    def tell(spoken: Spoken) -> None:
        for held in (at_once, primary, backup):
            say(held, spoken)

    for deed in deeds:
        match deed:
            case "share":
                ids = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
                shares.append(push(said + 1, len(shares), ids, behind=data.draw(st.integers(0, 3))))
                tell(shares[-1])
            case "again" if shares:
                tell(data.draw(st.sampled_from(shares)))
            case "advance":
                said, counted = said + 1, len(shares)
                tell(advance(said, Adagrad(lr=0.1 * said)))  # their order shows
            case "settle" if due:
                held = due.pop(data.draw(st.integers(0, len(due) - 1)))
                with held.changed:
                    held.settle(held.version + 1)
            case "fill":
                backup = fresh()
                with primary.changed:
                    for each, body in primary.all_said():
                        say(backup, (each, b"".join(body)))
            case "promote":
                primary, backup = backup, primary
        assert said - 2 <= min(primary.version, backup.version) and primary.version <= said == at_once.version
    for held in (primary, backup):
        with held.changed:
            held.settle(said - 1)
            assert held.version >= said - 1
            held.settle()
        assert held.version == said
        assert held.survey(hashed=True).sha256 == at_once.survey(hashed=True).sha256
        assert held.survey(hashed=False).staleness == at_once.survey(hashed=False).staleness
    assert sum(at_once.survey(hashed=False).staleness.values()) == counted, "each share that is in the rows, once"


def test_a_state_is_of_the_moment_behind_all_that_was_said() -> None:
    held = HeldRows(0, KIND, since=1, most=2)
    lay(held)
    for count in (1, 2):
        say(held, push(count, 0, [7], behind=count - 1))
        say(held, advance(count, Adagrad(lr=0.1)))
    assert held.version == 0
    say(held, push(3, 0, [7], behind=2))  # somebody is in the next step already
    resumed = HeldRows(0, KIND, since=1)
    with held.changed:
        state = bytes(held.states().packed())
    say(resumed, (Lay([0], 2), state))
    assert held.version == resumed.version == 2 and rows(held, 7) == rows(resumed, 7) != rows(laid(KIND), 7)
    assert resumed.survey(hashed=False).staleness == {0: 1, 1: 1}
    say(resumed, push(3, 0, [7], behind=0))
    say(resumed, advance(3, Adagrad(lr=0.1)))
    assert resumed.survey(hashed=False).staleness == {0: 2, 1: 1}
