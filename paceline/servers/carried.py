"""A script's optimizer in words: what a server must know to do the same, and what of it changes from step to step.

    carried = describe(optimizer, params)      once, before the first step
    values = hyper(optimizer, carried)         with every step, so that schedulers work

`hyper` gives what differs from the description, not from the step before: each step can be repeated by itself,
whatever a server has missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from paceline.errors import UsageError

OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW, Adagrad, RMSprop)}
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
Values = dict[str, Any]
"""Options by name, as plain values: a tuple is a list, a tensor of one element {"dtype": …, "value": …}."""


class Laid(msgspec.Struct, frozen=True):
    """How a parameter lies in memory: without gaps, but perhaps not in the order of its indices (channels last)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class Group(msgspec.Struct, frozen=True):
    options: Values
    params: list[int | None]
    """The run's parameters in this group, by number, in the optimizer's order; None for one that is not trained."""


class Carried(msgspec.Struct, frozen=True):
    name: str
    groups: list[Group]
    laid: list[Laid]
    """All of the run's parameters."""
    default_dtype: str
    """torch counts steps in it."""
    accumulator: float = 0.0
    """What Adagrad's sums start from. torch takes the constructor's value, whatever a group says."""


def describe(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Carried:
    """The optimizer, for servers; `params` are the run's, in its order. Refuses what servers could not do the same way."""
    name = type(optimizer).__name__
    if type(optimizer) is not OPTIMIZERS.get(name):
        raise UsageError(
            f"the servers cannot run the script's {type(optimizer).__module__}.{name}: they run torch's own "
            f"{', '.join(OPTIMIZERS)}, not others and no subclasses. Use one of these, or a strategy without servers"
        )
    numbers = {id(param): number for number, param in enumerate(params)}
    groups = []
    for group in optimizer.param_groups:
        held = [_number(param, numbers) for param in group["params"]]
        groups.append(Group(_options(optimizer, group), held))
    accumulator = float(optimizer.defaults.get("initial_accumulator_value", 0.0))
    return Carried(name, groups, [_laid(param) for param in params], str(torch.get_default_dtype()), accumulator)


def hyper(optimizer: Optimizer, carried: Carried | None = None) -> list[Values]:
    """The options of each group now; with a description, only those that differ from it."""
    now = [_options(optimizer, group) for group in optimizer.param_groups]
    if carried is None:
        return now
    if [len(group["params"]) for group in optimizer.param_groups] != [len(group.params) for group in carried.groups]:
        raise UsageError(
            f"the prepared {type(optimizer).__name__} got parameters or groups while the run trains, and servers have those of its "
            "beginning: put all into it before the loop (with lr=0 until they train), or use --strategy allreduce"
        )
    return [
        {name: value for name, value in options.items() if name not in group.options or group.options[name] != value}
        for options, group in zip(now, carried.groups, strict=True)
    ]


def refuse_closure(closure: object) -> None:
    if closure is not None:
        raise UsageError(
            "optimizer.step(closure) cannot be carried to servers: they have no model to call it on. Compute the "
            "gradients inside run.slots() and call optimizer.step() without arguments"
        )


def _number(param: torch.Tensor, numbers: dict[int, int]) -> int | None:
    number = numbers.get(id(param))
    if number is None and param.requires_grad:
        raise UsageError(
            f"the optimizer holds a tensor of shape {tuple(param.shape)} that belongs to no prepared model: the servers "
            "do not have it. Give its model to run.prepare()"
        )
    return number


def _laid(param: torch.Tensor) -> Laid:
    if str(param.dtype) not in DTYPES:
        raise UsageError(f"a parameter of type {param.dtype} cannot lie on servers, only {', '.join(DTYPES)}")
    laid = Laid(tuple(param.shape), tuple(param.stride()), str(param.dtype))
    if torch.empty_like(param, device="meta").stride() != param.stride():
        raise UsageError(
            f"a parameter of shape {laid.shape} has strides {laid.stride}, with gaps or overlaps in memory, and cannot be "
            "cut up for servers; make it contiguous() before the optimizer is built"
        )
    return laid


def _options(optimizer: Optimizer, group: dict[str, Any]) -> Values:
    """As plain values. What the script keeps in a group for itself comes along if it is plain."""
    for flag in ("differentiable", "capturable"):
        if group.get(flag):
            raise UsageError(f"{type(optimizer).__name__}({flag}=True) cannot be carried to servers; leave {flag} out")
    _refuse_halves(optimizer, group)
    options = {}
    for name, value in group.items():
        if name == "params":
            continue
        try:
            options[name] = plain(value)
        except TypeError as error:
            if name in optimizer.defaults:
                kind = type(optimizer).__name__
                raise UsageError(
                    f"{kind}'s {name} cannot be carried to servers: {error}. Use a Python number"
                ) from None
    return options


def _refuse_halves(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """With halves these two do not go element by element: foreach rounds otherwise in a step in which any parameter of the
    group gets its first gradient, and fused leaves parameters as they are in its first step (measured, torch 2.13)."""
    kind = "foreach" if group.get("foreach") else "fused" if group.get("fused") else None
    if type(optimizer) is SGD and kind and group["momentum"] and any(p.dtype.itemsize == 2 for p in group["params"]):
        raise UsageError(
            f"SGD(momentum=…, {kind}=True) on halves cannot be carried to servers: torch computes it otherwise for a "
            f"stretch of a tensor than for the whole. Leave {kind} out"
        )


def plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (np.bool_, np.integer)):
        return value.item()
    if isinstance(value, (int, float)):  # np.float64 too, which computes as a float does
        return float(value) if isinstance(value, float) else value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.requires_grad or value.device.type != "cpu" or str(value.dtype) not in DTYPES:
            raise TypeError(
                f"it is a tensor of {value.numel()} {value.dtype} on {value.device}{', with a gradient' * value.requires_grad}"
            )
        return {"dtype": str(value.dtype), "value": value.item()}
    raise TypeError(f"it is a {type(value).__module__}.{type(value).__name__}")


def unplain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(unplain(item) for item in value)
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]])
    return value
