"""fit(): the training loop for those who want none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from paceline.errors import UsageError
from paceline.run import Run, init


def fit(
    step: Callable[[Any, Any], torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    *,
    epochs: int = 1,
    scheduler: Any = None,
    clip: float | None = None,
    evaluate: tuple[Callable[[Any, Any], dict[str, Any]], Any] | None = None,
    callbacks: Sequence[Callable[[Run], None]] = (),
    **settings: Any,
) -> Run:
    """Train `model` on `loader`: `step(model, batch)` returns the mean loss of its batch.

    `evaluate=(fn, test_loader)` runs after every epoch: `fn(model, batch)` returns a dict of sums, one of
    them named ``count``; what is logged is every other sum divided by it. `scheduler` is stepped once a
    step, a `ReduceLROnPlateau` once an epoch with the first evaluated metric. `callbacks` are called after every epoch. Other
    keywords are settings of the run, as for `paceline.init()`. Returns the finished run.

        paceline.fit(
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=3,
        )
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and evaluate is None:
        raise UsageError("fit() with a ReduceLROnPlateau needs evaluate=: it steps by the first evaluated metric")
    run = init(**settings)
    prepared = [model, optimizer, loader] + ([scheduler] if scheduler is not None else [])
    run.prepare(*prepared)
    by_epoch = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    for _ in run.epochs(epochs):
        model.train()
        for _batch in loader:
            loss = torch.zeros(())
            for share in run.slots():
                loss = step(model, share)
                loss.backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and not by_epoch:
                scheduler.step()
            run.log(loss=loss.detach())
        measured = _evaluate(run, model, evaluate) if evaluate is not None else {}
        if by_epoch:
            scheduler.step(next(iter(measured.values())))
        for callback in callbacks:
            callback(run)
    run.finish()
    return run


def _evaluate(
    run: Run, model: nn.Module, evaluate: tuple[Callable[[Any, Any], dict[str, Any]], Any]
) -> dict[str, float]:
    fn, loader = evaluate
    sums = run.evaluate(lambda batch: fn(model, batch), loader)
    count = sums.pop("count", 1.0) or 1.0
    means = {name: value / count for name, value in sums.items()}
    run.log(**means)
    return means
