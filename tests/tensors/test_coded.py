"""Gradients that travel coded: what comes out depends on the shares alone, not on who carries them, nor on who dies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.feedback import kept_at_first, send
from paceline.tensors.codecs.kept import Kept
from paceline.tensors.coded import CodedReducer
from paceline.tensors.peers import Alone, TermEnded
from paceline.tensors.reduce import Outcome
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import same, tree_sum, tree_weight
from tests.tensors.codecs.drawn import NAMES
from tests.tensors.points import Grads, sparse
from tests.tensors.test_reduce_losses import Losing
from tests.tensors.together import CPU, Table

TENSORS = [
    torch.empty(9, 11),
    torch.empty(300, dtype=torch.bfloat16),
    torch.empty(5, dtype=torch.float64),
    torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.empty(6),  # a buffer
]
PARAMS = 4
CODED = [0, 1, 3]
SHAPES = [TENSORS[index].shape for index in CODED]
Loss = tuple[int, frozenset[int], str]
"""In which step, who is lost, and at which call the others learn of it."""


def share(step: int, leaf: int) -> tuple[Grads, float]:
    """A share's gradients and its weight. Some have no gradient of some tensors; one in ten has no sample."""
    random = torch.Generator().manual_seed(1000 * step + leaf)
    grads: Grads = [torch.randn(tensor.shape, generator=random).to(tensor.dtype) for tensor in TENSORS]
    for index in range(PARAMS):
        if torch.rand((), generator=random) < 0.2:
            grads[index] = None
    weight = [1.0, 1.0, 3.0, 2.0, 0.0][int(torch.randint(5, (), generator=random))] if step % 2 else 1.0
    return (grads if weight else [None] * len(grads)), weight


def wanted(name: str, steps: int, leaves: int) -> list[list[torch.Tensor | None]]:
    """By the definition: of each step the gradients that were coded."""
    codec = parse(name)
    kept = [kept_at_first(codec, SHAPES) for _ in range(leaves)]
    reducer = CodedReducer(TENSORS, PARAMS, Alone(CPU), codec)  # for its seeds alone
    results = []
    for step in range(steps):
        reducer.begin(step, 0)
        decoded, weights, present = [], [], [False] * len(CODED)
        for leaf in range(leaves):
            grads, weight = share(step, leaf)
            mine = [grads[index] for index in CODED]
            flat = torch.cat(
                [
                    torch.zeros(shape.numel()) if grad is None else memory_order(grad).float() * weight
                    for grad, shape in zip(mine, SHAPES, strict=True)
                ]
            )
            ends = torch.tensor([shape.numel() for shape in SHAPES]).cumsum(0).tolist()
            stretches = [slice(end - shape.numel(), end) for end, shape in zip(ends, SHAPES, strict=True)]
            absent = [at for grad, at in zip(mine, stretches, strict=True) if grad is None]
            new, out = torch.empty_like(kept[leaf]), torch.zeros_like(flat)
            message = send(codec, flat, SHAPES, reducer._seed, kept[leaf], new, absent)
            codec.decode(message, SHAPES, reducer._seed, out)
            for at in absent:
                out[at] = 0.0
            kept[leaf] = new
            decoded.append(out)
            weights.append(weight)
            present = [had or grad is not None for had, grad in zip(present, mine, strict=True)]
        total = tree_sum(decoded) / (tree_weight(weights) or 1.0)
        results.append([total[at] if had else None for at, had in zip(stretches, present, strict=True)])
    return results


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 2, 3, 1).reshape(-1) if tensor.dim() == 4 else tensor.reshape(-1)


class Shared:
    """Memory that outlives the workers that are threads here."""

    def __init__(self, name: str) -> None:
        self._kept = Kept(parse(name), SHAPES, None)
        self.of: dict[tuple[int, int], torch.Tensor] = {}

    def give(self, reducer: CodedReducer) -> None:
        def allocated(call: int, leaves: int) -> torch.Tensor:
            return self.of.setdefault((call, leaves), Kept._allocated(self._kept, call, leaves))

        reducer.kept._allocated = allocated  # type: ignore[method-assign]


def train(name: str, workers: int, steps: int, leaves: int, losses: Sequence[Loss] = ()) -> list[Outcome]:
    """What came of each step, as the workers that are left in the end have it."""
    shared, table = Shared(name), Table(workers)
    reducers = []
    for rank in range(workers):
        reducers.append(CodedReducer(TENSORS, PARAMS, Losing(table, rank), parse(name)))
        shared.give(reducers[-1])
    results = []
    for step in range(steps):
        plan = Plan.of(leaves, len(reducers))
        due = {id(reducer): plan.leaves_of(rank) for rank, reducer in enumerate(reducers)}
        kept = {id(reducer): len(plan.parts(rank)) for rank, reducer in enumerate(reducers)}
        for reducer in reducers:
            reducer.begin(step, 0)
            reducer.open(plan, 1)
        for _, gone, breaks_at in [loss for loss in losses if loss[0] == step]:
            assert met(reducers, due, step, breaks_at) == [None] * len(reducers)
            plan = plan.without(gone)
            reducers = [reducer for rank, reducer in enumerate(reducers) if rank not in gone]
            table = Table(len(reducers))
            for rank, reducer in enumerate(reducers):
                due[id(reducer)] = reducer.carry_on(plan, Losing(table, rank), 1, kept[id(reducer)])
        outcomes = met(reducers, due, step, "")
        assert all(outcome is not None for outcome in outcomes)
        first = outcomes[0]
        assert first is not None
        for outcome in outcomes[1:]:
            assert outcome is not None and outcome.present == first.present
            assert all(same(a, b) for a, b in zip(outcome.views, first.views, strict=True))
        first.views = [view.clone() for view in first.views]
        results.append(first)
    return results


def met(reducers: list[CodedReducer], due: dict[int, list[int]], step: int, breaks_at: str) -> list[Outcome | None]:
    def work(reducer: CodedReducer) -> Outcome | None:
        assert isinstance(reducer.peers, Losing)
        reducer.peers.breaks_at = breaks_at
        for leaf in due[id(reducer)]:
            reducer.fold(leaf, *share(step, leaf))
        try:
            return reducer.commit(7, 0, [step], True, 1.0)
        except TermEnded:
            return None

    with ThreadPoolExecutor(len(reducers)) as pool:
        return [done.result() for done in [pool.submit(work, reducer) for reducer in reducers]]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_added_up_is_what_each_share_decodes_to(name: str) -> None:
    for step, want in zip(train(name, 2, 4, 5), wanted(name, 4, 5), strict=True):
        for index, value in zip(CODED, want, strict=True):
            assert step.present[index] == (value is not None)
            if value is not None:
                assert same(memory_order(step.views[index]), value)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_at_any_worker_count(name: str) -> None:
    alone = train(name, 1, 4, 6)
    for workers in (2, 3, 4):
        check_same(train(name, workers, 4, 6), alone)


@settings(max_examples=30)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["exchange", "total", "gather"])), min_size=1, max_size=2),
    st.data(),
)
def test_a_death_in_any_step_changes_nothing(
    name: str, workers: int, times: list[tuple[int, str]], data: st.DataObject
) -> None:
    """Whoever redoes a share starts from what the last committed step has kept of it."""
    losses, left = [], workers
    for step, breaks_at in sorted(times):
        if left > 1:
            losses.append((step, frozenset({data.draw(st.integers(0, left - 1))}), breaks_at))
            left -= 1
    check_same(train(name, workers, 4, 6, losses), train(name, 1, 4, 6))


def check_same(got: Sequence[Outcome], want: Sequence[Outcome]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.present == other.present and one.weight == other.weight
        for index, (a, b) in enumerate(zip(one.views, other.views, strict=True)):
            assert not one.present[index] or same(a, b), f"tensor {index}"


def test_plain_tensors_travel_as_ever() -> None:
    (outcome,) = train("topk:0.01", 2, 1, 3)
    grads = [share(0, leaf)[0] for leaf in range(3)]
    for index in (2, 4):
        values = [torch.zeros_like(TENSORS[index]) if g[index] is None else g[index] for g in grads]
        assert same(outcome.views[index], tree_sum([value for value in values if value is not None]) / 3)


def test_a_sparse_gradient_is_refused_with_a_way_out() -> None:
    reducer = CodedReducer([torch.empty(7, 3)], 1, Alone(CPU), parse("int8"))
    reducer.begin(0, 0)
    reducer.open(Plan.of(1, 1), 0)
    with pytest.raises(UsageError, match="sparse=False"):
        reducer.fold(0, [sparse([1, 2], 7, 0)], 1.0)


def test_messages_are_counted_and_those_that_can_be_are_added_before_they_leave() -> None:
    sizes = {}
    for name, workers in product(["randomk:0.5", "int8"], [1, 2]):
        table = Table(workers)
        reducers = [CodedReducer([torch.empty(1000)], 1, Losing(table, rank), parse(name)) for rank in range(workers)]

        def work(reducer: CodedReducer, workers: int = workers) -> None:
            plan = Plan.of(4, workers)
            reducer.begin(0, 0)
            reducer.open(plan, 0)
            for leaf in plan.leaves_of(reducer.peers.rank):
                reducer.fold(leaf, [torch.ones(1000)], 1.0)
            reducer.commit(1, 0, [], True, 1.0)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, reducers))
        sizes[name, workers] = [reducer.sent_bytes for reducer in reducers]
    each = 8 + 1000 + 4 * 4
    assert sizes == {
        ("randomk:0.5", 1): [8 + 2000],
        ("randomk:0.5", 2): [8 + 2000] * 2,
        ("int8", 1): [4 * each],
        ("int8", 2): [2 * each] * 2,
    }
