"""Evaluation and prediction, split over the workers: each sample once, the same bits at any count.

A loader's own batches are dealt out one by one (worker k takes numbers k, k + n, …), so what is in a
batch never depends on the worker count. Per-batch results are brought together and added in the
batches' order, in double precision. A worker that dies takes its batches' results with it: the caller
begins again, and the rest deal them out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.data.copies import strided
from paceline.data.order import mix
from paceline.data.random import seeded, set_seed
from paceline.data.values import place
from paceline.errors import UsageError, a_kind
from paceline.tensors.snapshot import Snapshot
from paceline.wires.board import Phase
from paceline.worker.session import user_line

if TYPE_CHECKING:
    from paceline.run import Run

_KEY = mix(101)


def evaluate(run: Run, fn: Callable[[Any], dict[str, Any]], loader: Any) -> dict[str, float]:
    mine: list[tuple[int, dict[str, float]]] = []
    with _at_evaluation(run, "evaluate()"):
        for number, batch in _own_batches(run, loader):
            sums = fn(batch)
            if not isinstance(sums, dict):
                raise UsageError(
                    f"{user_line()}: the function given to evaluate() returned {a_kind(sums)}; it must return a "
                    'dict of sums over its batch, such as {"correct": …, "count": len(y)}'
                )
            mine.append((number, {name: float(value) for name, value in sums.items()}))
        payloads = run.terms.meeting.gather(_KEY, msgspec.msgpack.encode(mine))
    parts = sorted(
        (part for raw in payloads for part in msgspec.msgpack.decode(raw, type=list[tuple[int, dict[str, float]]])),
        key=lambda part: part[0],
    )
    totals: dict[str, float] = {}
    for _, sums in parts:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def predict(run: Run, fn: Callable[[Any], torch.Tensor], loader: Any) -> torch.Tensor:
    mine: list[tuple[int, torch.Tensor]] = []
    with _at_evaluation(run, "predict()"):
        for number, batch in _own_batches(run, loader):
            value = fn(batch)
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"{user_line()}: the function given to predict() must return a tensor")
            mine.append((number, value.detach().to("cpu", copy=True)))  # fn may write into it again
        payloads = run.terms.meeting.gather(_KEY, Snapshot(mine).to_bytes())
    parts = [part for raw in payloads for part in Snapshot.read(memoryview(raw)).tree]
    if not parts:
        return torch.empty(0)
    return torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])])


def _own_batches(run: Run, loader: Any) -> Iterator[tuple[int, Any]]:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{user_line()}: evaluate() and predict() take a DataLoader, not {a_kind(loader)}")
    if run.terms.following:
        return
    meeting = run.terms.meeting
    for number, batch in strided(loader, meeting.rank, meeting.size, mix(run.settings.seed, _KEY)):
        set_seed(mix(run.settings.seed, _KEY, number), run.device)
        yield number, place(batch, run.device)


@contextmanager
def _at_evaluation(run: Run, words: str) -> Iterator[None]:
    """Models in eval mode and no gradients inside; everything as it was afterwards."""
    session = run._session
    session.at = words
    session.row.enter(Phase.EVALUATE)
    models = [(module, module.training) for model in run._replica.models for module in model.modules()]
    for model in run._replica.models:
        model.eval()
    try:
        with torch.no_grad(), seeded(mix(run.settings.seed, _KEY), run.device):
            yield
    finally:
        for module, training in models:
            module.training = training
        session.row.enter(Phase.SCRIPT)
