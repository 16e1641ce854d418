"""Members are lost at a reduce point: the rest come to the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.peers import Alone, TermEnded
from paceline.tensors.reduce import Outcome, Reducer
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import reduced, same, tree_weight
from tests.tensors.points import Case, Grads, cases, sparse
from tests.tensors.together import CPU, Member, Table


class Losing(Member):
    """A member whose group breaks: at this call it learns that somebody is gone."""

    breaks_at = ""

    def _breaks(self, call: str) -> None:
        if self.breaks_at == call:
            raise TermEnded(call)

    def exchange(self, key: int, lanes: Any) -> Any:
        self._breaks("exchange")
        return super().exchange(key, lanes)

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        self._breaks("total")
        flats = super().total(call, divisor)
        self._breaks("totalled")
        return flats

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self._breaks("gather")
        return super().gather(key, payload)


@dataclass
class Worker:
    """One worker's way through the terms of one reduce point."""

    number: int
    reducer: Reducer
    due: list[int]
    kept: int
    outcome: Outcome | None = None


Loss = tuple[frozenset[int], str]
"""Who is lost, and at which call the others learn of it."""


def carry_through(case: Case, losses: Sequence[Loss], device: torch.device = CPU, lanes: int = 2) -> list[Worker]:
    """The workers that are left when each of these losses has broken the point once; they have met in the end."""
    plan = Plan.of(len(case.shares), case.workers)
    table = Table(case.workers)
    everyone = []
    for rank in range(case.workers):
        member = Losing(table, rank, device)
        reducer = Reducer(case.tensors, case.count, member)
        reducer.open(plan, lanes)
        everyone.append(Worker(rank, reducer, plan.leaves_of(rank), len(plan.parts(rank))))
    lost: frozenset[int] = frozenset()
    for gone, breaks_at in [*losses, (frozenset(), "")]:
        meet(case, everyone, breaks_at, lanes)
        if not breaks_at:
            break
        lost |= gone
        everyone = [worker for worker in everyone if worker.number not in lost]
        table, rest = Table(len(everyone)), plan.without(lost)
        for rank, worker in enumerate(everyone):
            worker.due = worker.reducer.carry_on(rest, Losing(table, rank, device), lanes, worker.kept)
            assert worker.due == [leaf for leaf in rest.leaves_of(rank) if leaf not in plan.leaves_of(worker.number)]
    return everyone


def meet(case: Case, everyone: list[Worker], breaks_at: str, lanes: int) -> None:
    """All fold what they have due, each in a thread of its own, and meet; or learn that they cannot."""

    def work(worker: Worker) -> None:
        assert isinstance(worker.reducer.peers, Losing)
        worker.reducer.peers.breaks_at = breaks_at
        for leaf in worker.due:
            worker.reducer.fold(leaf, case.shares[leaf], case.weights[leaf])
        try:
            worker.outcome = worker.reducer.commit(7, 0, [worker.number] * lanes, True, 1.0)
            assert not breaks_at or (breaks_at == "gather" and not has_sparse(case))
        except TermEnded:
            assert breaks_at

    with ThreadPoolExecutor(len(everyone)) as pool:
        for done in [pool.submit(work, worker) for worker in everyone]:
            done.result()


def has_sparse(case: Case) -> bool:
    return any(grad is not None and grad.is_sparse for share in case.shares for grad in share)


def check_carried(case: Case, left: Sequence[Worker]) -> None:
    for worker in left:
        outcome = worker.outcome
        assert outcome is not None
        assert outcome.weight == tree_weight(case.weights)
        assert outcome.rows.tolist() == [[other.number] * 2 for other in left]
        for index, view in enumerate(outcome.views):
            grads = [share[index] for share in case.shares]
            dense = [None if grad is None or grad.is_sparse else grad for grad in grads]
            want = reduced(dense, case.weights, case.tensors[index], outcome.divisor)
            assert same(view, want)
            if index < case.count:
                assert outcome.present[index] == any(grad is not None for grad in dense)
            rows = [grad.to_dense() if grad is not None and grad.is_sparse else None for grad in grads]
            if any(row is not None for row in rows):
                want = reduced(rows, case.weights, case.tensors[index], outcome.divisor)
                assert torch.equal(outcome.sparse[index].to_dense(), want)
            else:
                assert index not in outcome.sparse


@st.composite
def lossy(draw: st.DrawFn) -> tuple[Case, list[Loss]]:
    """A point, with a table of sparse rows among its tensors at times, and one to three losses."""
    case = draw(cases(workers=st.integers(2, 6)))
    if draw(st.booleans()):
        kinds = st.none() | st.lists(st.integers(0, 6), max_size=4, unique=True)
        drawn = [draw(kinds) for _ in case.shares]
        case.tensors.insert(0, torch.empty(7, 3))
        case.count += 1
        for leaf, (share, at) in enumerate(zip(case.shares, drawn, strict=True)):
            share.insert(0, None if at is None else sparse(at, 7, leaf))
    calls = st.sampled_from(["exchange", "total", "totalled", "gather"] if has_sparse(case) else ["exchange", "total"])
    order = draw(st.permutations(range(case.workers)))
    losses, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        more = draw(st.integers(0 if losses else 1, max(1, case.workers - 1 - at)))
        if at + more >= case.workers:
            break
        losses.append((frozenset(order[at : at + more]), draw(calls)))
        at += more
    return case, losses


@given(lossy())
def test_whoever_is_lost_the_rest_come_to_the_same_bits(drawn: tuple[Case, list[Loss]]) -> None:
    case, losses = drawn
    check_carried(case, carry_through(case, losses))


@given(lossy())
def test_losses_on_a_device_that_the_peers_do_not_share(drawn: tuple[Case, list[Loss]]) -> None:
    case, losses = drawn
    check_carried(case, carry_through(case, losses, device=torch.device("cpu", 0)))


def twelve(workers: int) -> Case:
    """Parameters that only some shares touch, a buffer, and weights whose order of addition shows."""
    generator = torch.Generator().manual_seed(workers)
    tensors = [torch.empty(5), torch.empty(2, 3), torch.empty(4)]
    shares: list[Grads] = [
        [
            torch.randn(5, generator=generator) if leaf % 3 else None,
            torch.randn(2, 3, generator=generator) if leaf == 4 else None,
            torch.randn(4, generator=generator),
        ]
        for leaf in range(12)
    ]
    return Case(workers, tensors, 2, shares, [0.1, 1e9, 0.3, 1.0, 0.7, 0.2] * 2)


@pytest.mark.parametrize("lost", [c for n in (1, 2, 3) for c in combinations(range(4), n)], ids=str)
@pytest.mark.parametrize("breaks_at", ["exchange", "total", "totalled"])
def test_every_subset_of_four(lost: tuple[int, ...], breaks_at: str) -> None:
    case = twelve(4)
    check_carried(case, carry_through(case, [(frozenset(lost), breaks_at)]))


@pytest.mark.parametrize("first", range(4))
def test_a_second_loss_in_the_retry_takes_its_shares_of_the_first(first: int) -> None:
    for second in set(range(4)) - {first}:
        case = twelve(4)
        check_carried(case, carry_through(case, [(frozenset({first}), "exchange"), (frozenset({second}), "total")]))


def test_a_presence_that_only_the_lost_one_saw_comes_from_whoever_takes_its_share() -> None:
    case = twelve(3)  # leaf 4, the only one to touch the second parameter, is worker 1's
    for worker in carry_through(case, [(frozenset({1}), "total")]):
        assert worker.outcome is not None and worker.outcome.present[:2] == [True, True]


def test_the_next_point_is_as_if_nothing_had_been() -> None:
    """The reducer that carried on opens another point among those who are left."""
    case = twelve(3)
    left = carry_through(case, [(frozenset({0}), "exchange")])
    table, plan = Table(2), Plan.of(12, 2)
    for rank, worker in enumerate(left):
        worker.reducer.peers = Losing(table, rank)
        worker.reducer.open(plan, 2)
        worker.due = plan.leaves_of(rank)
    meet(case, left, "", 2)
    check_carried(case, left)


def test_nothing_holds_the_memory_of_a_group_that_is_over() -> None:
    """It is shared memory of the size of the model, for every death."""
    grads = [torch.ones(5), torch.ones(3, 2)]
    plan, group = Plan.of(1, 1), Alone(CPU)
    reducer = Reducer(grads, len(grads), group)
    reducer.open(plan, 0)
    reducer.fold(0, grads, 1.0)
    memory = weakref.ref(group.parts()[0][0])
    for _ in range(2):
        reducer.carry_on(plan, Alone(CPU), 0, 1)
    reducer.peers = Alone(CPU)
    reducer.open(plan, 0)
    reducer.fold(0, grads, 1.0)
    del group
    gc.collect()
    assert memory() is None
