"""What a script must not do, found before its workers train apart, and what it has forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from paceline.errors import OWN_GROUP, UsageError, a_kind
from paceline.loop.steps import Stepper
from paceline.state.replica import Replica
from paceline.worker.session import user_line


def refuse_own_group() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(f"{user_line()}: {OWN_GROUP}")


def between_points(stepper: Stepper, what: str, free: bool = False) -> None:
    """Workers are about to meet: none of them may be in the middle of a reduce point."""
    stepper.check_left_early()
    if stepper.inside:
        raise UsageError(f"{user_line()}: {what} inside the loop over run.slots(); move it one level out")
    if free and stepper.active:
        raise UsageError(
            f"{user_line()}: {what} inside the loop over the loader, where workers run at their own pace and cannot meet; "
            "move it behind the loop"
        )


def optimizer_steps(stepper: Stepper | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """optimizer.step() where no reduced gradient can be: say so instead of training apart."""
    closure = len(args) > 1 or kwargs.get("closure")
    if closure and stepper is not None and not stepper.alone:
        raise UsageError(
            f"{user_line()}: optimizer.step(closure) computes gradients out of reach of the other workers; only a run of "
            "one slot can use it (paceline run -n 1 --slots 1)"
        )
    if stepper is not None and stepper.inside:
        raise UsageError(
            f"{user_line()}: optimizer.step() inside the loop over run.slots(): the gradient is whole only after it; "
            "move optimizer.step() one level out"
        )
    if stepper is None or not stepper.active:
        raise UsageError(
            f"{user_line()}: optimizer.step() outside a step of the run: the loader in this loop was not given to "
            "run.prepare(), or the loop is not inside `for epoch in run.epochs(n):`"
        )
    stepper.check_left_early()
    if stepper.call == 0 and not stepper.alone:
        stepper.no_reduce()


def refuse_unprepared(replica: Replica) -> None:
    """A parameter that a prepared optimizer trains, but that no prepared model has, would get a share's gradient only."""
    known = {id(param) for model in replica.models for param in model.parameters()}
    for optimizer in replica.optimizers:
        for group, each in enumerate(optimizer.param_groups):
            for number, param in enumerate(each["params"]):
                if param.requires_grad and id(param) not in known:
                    raise UsageError(
                        f"{user_line()}: the prepared {type(optimizer).__name__} trains a parameter of shape {tuple(param.shape)} "
                        f"(number {number} of its group {group}) that is in no prepared model, so workers would train it apart: "
                        "give its module to run.prepare() too (a parameter by itself: put it into an nn.ParameterList)"
                    )


class ForgottenOptimizers:
    """Tells once of each optimizer that changes prepared parameters and that the run was not given: from its first step on."""

    def __init__(self, replica: Replica, registered: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._known = {id(item) for item in [*replica.optimizers, *registered.values()]}
        self._params = {id(param) for model in replica.models for param in model.parameters()}
        self._told: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._warn = warn
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._known or optimizer in self._told:
            return
        self._told.add(optimizer)
        if any(id(param) in self._params for group in optimizer.param_groups for param in group["params"]):
            self._warn(
                f"{user_line()}: this {type(optimizer).__name__} changes prepared parameters but was not given to prepare(): a "
                "worker that replaces a lost one, and a resumed run, would start it anew; add it to prepare()"
            )

    def close(self) -> None:
        self._hook.remove()


def forgotten_schedulers(replica: Replica, registered: Iterable[Any]) -> Iterator[str]:
    """A warning for each scheduler of a prepared optimizer that the run was not given."""
    known = {id(item) for item in [*replica.schedulers, *registered]}
    driven = {id(optimizer) for optimizer in replica.optimizers}
    for item in gc.get_objects():
        if issubclass(type(item), LRScheduler) and id(item) not in known and id(item.optimizer) in driven:
            yield (
                f"{a_kind(item)} drives a prepared optimizer but was not given to prepare(): in a worker that replaces "
                "a lost one, and in a resumed run, it would begin anew and set other learning rates, which ends the run; "
                "add it to prepare()"
            )


def forgotten_averages(replica: Replica, registered: Iterable[Any]) -> Iterator[str]:
    """A warning for each copy of a prepared model, as an EMA is one, that the run was not given."""
    given = [*replica.models, *(item for item in registered if isinstance(item, nn.Module))]
    known = {id(module) for model in given for module in model.modules()}
    shapes = {_shapes(model) for model in replica.models}
    copies = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), nn.Module) and id(item) not in known and _is_copy(item, replica, shapes)
    ]
    inner = {id(module) for item in copies for module in item.modules() if module is not item}
    for item in copies:
        if id(item) not in inner:
            yield (
                f"{a_kind(item)} like a prepared model is neither prepared nor registered: if it changes while the run "
                "trains, as an average of weights does, a worker that replaces a lost one, and a resumed run, would begin it "
                "anew; name it: run.register('ema', …)"
            )


def planned_by_rounds(strategy: str, rounds: int, schedulers: Iterable[Any]) -> str:
    """What is to be said of schedulers where clients train: nothing of one that has no plan. `rounds`: 0, if the script says."""
    kinds = [type(item).__name__ for item in schedulers if not isinstance(item, ReduceLROnPlateau)]
    if not kinds:
        return ""
    plan = f"{rounds} rounds" if rounds else "the n rounds of run.epochs(n)"
    return (
        f"with --strategy {strategy} a prepared scheduler ({', '.join(kinds)}) goes on by one each round, also where it is stepped "
        f"in the loop over the loader: plan it for {plan}, not for batches"
    )


def each_its_own(strategy: str, registered: Mapping[str, Any]) -> str:
    """What is to be said of registered modules where workers meet in no step."""
    modules = [f"{name!r} ({type(item).__name__})" for name, item in registered.items() if isinstance(item, nn.Module)]
    if not modules:
        return ""
    return (
        f"with --strategy {strategy} each worker has its own of what is registered as {', '.join(modules)}: an average in it is of "
        "what that worker has seen; run.save() and checkpoints have main's"
    )


def _is_copy(item: nn.Module, replica: Replica, shapes: set[tuple[torch.Size, ...]]) -> bool:
    if isinstance(item, AveragedModel):
        return True
    return any(type(item) is type(model) for model in replica.models) and _shapes(item) in shapes


def _shapes(model: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(param.shape for param in model.parameters())


def first_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What is to be said of a prepared optimizer's first step: nothing, unless there is nothing in it to do."""
    closure = len(args) > 1 or kwargs.get("closure")
    if closure or any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
        return ""
    return (
        f"{user_line()}: the first step of this {type(optimizer).__name__} finds no gradient in any of its parameters: is the "
        "model that the loop trains the one that was given to run.prepare(), and to the optimizer?"
    )
