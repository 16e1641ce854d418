"""The script's optimizer on a server, and its state by pieces.

A server runs the same torch class with the same options on stretches of the parameters. All of the listed
optimizers go element by element, so the bits are those of the whole tensors, if the stretches are cut at
multiples of `pieces.LINE` and torch has one thread here and there (several threads cut a tensor themselves,
at places of their own).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Adagrad

from paceline.errors import MismatchError
from paceline.servers.carried import DTYPES, OPTIMIZERS, Carried, Laid, Values, unplain
from paceline.servers.pieces import Piece

State = dict[str, Any]
"""What an optimizer keeps for one piece: tensors as long as the piece, its count of steps, plain values."""
_COUNT = "step"
"""The one entry that is not by element, in all of the listed optimizers."""


class Engine:
    """One optimizer for some pieces, whose memory it changes in place: a server's share, or one fragment of it."""

    def __init__(self, carried: Carried, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
        self._carried, self.pieces, self._values = carried, list(pieces), list(values)
        home = {param: number for number, group in enumerate(carried.groups) for param in group.params}
        held: list[list[torch.Tensor]] = [[] for _ in carried.groups]
        for piece, value in zip(pieces, values, strict=True):
            _check(piece, value, carried.laid[piece.param])
            held[home[piece.param]].append(value)
        kind: Any = OPTIMIZERS[carried.name]
        more = {"initial_accumulator_value": carried.accumulator} if kind is Adagrad else {}
        self._known = kind([torch.empty(0)]).defaults.keys()
        self._changed: list[Values] = [{} for _ in carried.groups]
        """By how the last step's options differ from those of the description."""
        with self._as_in_the_script():
            groups = [{"params": held[number], **self._options(number, {})} for number in range(len(held))]
            self._optimizer = kind(groups, **more)

    def _options(self, group: int, changed: Values) -> Values:
        options = {**self._carried.groups[group].options, **changed}
        return {name: unplain(value) for name, value in options.items() if name in self._known}

    def cast(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """In the parameters' own types, as workers cast the sums too."""
        return [
            None if gradient is None else gradient.to(value.dtype)
            for gradient, value in zip(gradients, self._values, strict=True)
        ]

    def apply(self, gradients: Sequence[torch.Tensor | None], hyper: Sequence[Values], clip: float = 1.0) -> None:
        """One step. A piece without a gradient is left alone, and its state too. The gradients are used up: `clip`
        multiplies them in place, and some of torch's optimizers change them as well."""
        for number, (group, changed) in enumerate(zip(self._optimizer.param_groups, hyper, strict=True)):
            if changed != self._changed[number]:
                group.update(self._options(number, changed))
                self._changed[number] = changed
        for value, gradient in zip(self._values, self.cast(gradients), strict=True):
            if gradient is not None and clip != 1.0:
                gradient.mul_(clip)
            value.grad = gradient
        try:
            with self._as_in_the_script():
                self._optimizer.step()
        finally:
            for value in self._values:
                value.grad = None

    @contextmanager
    def _as_in_the_script(self) -> Iterator[None]:
        """torch asks for the default type when it makes the counts of steps."""
        before, theirs = torch.get_default_dtype(), DTYPES[self._carried.default_dtype]
        if theirs == before:
            yield
            return
        torch.set_default_dtype(theirs)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def capture(self) -> list[State]:
        """The state of each piece; the tensors are references, and the next step changes them."""
        return [dict(self._optimizer.state.get(value, {})) for value in self._values]

    def restore(self, states: Sequence[State]) -> None:
        """The reverse, into memory of its own; an empty state is that of a piece that never had a gradient."""
        for value, state in zip(self._values, states, strict=True):
            self._optimizer.state.pop(value, None)
            if state:
                self._optimizer.state[value] = {name: _own(item) for name, item in state.items()}


def cut(state_dict: dict[str, Any], carried: Carried, pieces: Sequence[Piece]) -> list[State]:
    """The states of these pieces out of a whole optimizer.state_dict(), as references where its tensors lie in the
    parameters' order."""
    states: dict[int | None, State] = {}
    for group, theirs in zip(carried.groups, state_dict["param_groups"], strict=True):
        for param, number in zip(group.params, theirs["params"], strict=True):
            states[param] = state_dict["state"].get(number, {})
    found = []
    for piece in pieces:
        laid, whole = carried.laid[piece.param], states.get(piece.param, {})
        found.append({name: _stretch(name, item, laid, piece) for name, item in whole.items()})
    return found


def join(carried: Carried, hyper: Sequence[Values], held: Iterable[tuple[Piece, State]]) -> dict[str, Any]:
    """The optimizer.state_dict() that the script would have, from all pieces of all servers. Parameters that are not
    trained have no state in it: the script's own optimizer still has theirs."""
    parts: dict[int, list[tuple[Piece, State]]] = {}
    for piece, state in held:
        parts.setdefault(piece.param, []).append((piece, state))
    count = itertools.count()
    states, groups = {}, []
    for group, changed in zip(carried.groups, hyper, strict=True):
        numbers = list(itertools.islice(count, len(group.params)))
        for number, param in zip(numbers, group.params, strict=True):
            if param is not None and (state := _whole(param, carried.laid[param], parts.get(param, []))):
                states[number] = state
        options = {**group.options, **changed}
        groups.append({n: v if n == "param_names" else unplain(v) for n, v in options.items()} | {"params": numbers})
    return {"state": states, "param_groups": groups}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as one row, in the order of its memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())


def _stretch(name: str, item: Any, laid: Laid, piece: Piece) -> Any:
    if name == _COUNT or not isinstance(item, torch.Tensor):
        return item
    if item.stride() != laid.stride:  # a gradient's order that momentum took over, or another script's
        item = torch.empty_strided(laid.shape, laid.stride, dtype=item.dtype).copy_(item)
    return flat(item)[piece.lo : piece.hi]


def _whole(param: int, laid: Laid, parts: list[tuple[Piece, State]]) -> State:
    parts = sorted((part for part in parts if part[0].hi > part[0].lo or not laid.numel), key=lambda part: part[0])
    ends = [0, *(piece.hi for piece, _ in parts)]
    if [piece.lo for piece, _ in parts] != ends[:-1] or ends[-1] != laid.numel:
        raise MismatchError(
            f"parameter {param} has {laid.numel} elements; the servers' pieces of it do not cover these once"
        )
    first = parts[0][1] if parts else {}
    if any(state.keys() != first.keys() or not _same(state.get(_COUNT), first.get(_COUNT)) for _, state in parts):
        raise MismatchError(f"the pieces of parameter {param} are not from the same step")
    whole: State = {}
    for name, item in first.items():
        if name == _COUNT or not isinstance(item, torch.Tensor):
            whole[name] = _own(item)
        else:
            whole[name] = torch.empty_strided(laid.shape, laid.stride, dtype=item.dtype)
            torch.cat([state[name] for _, state in parts], out=flat(whole[name]))
    return whole


def _same(one: Any, other: Any) -> bool:
    return (None if one is None else float(one)) == (None if other is None else float(other))


def _own(item: Any) -> Any:
    return item.detach().clone(memory_format=torch.preserve_format) if isinstance(item, torch.Tensor) else item


def _check(piece: Piece, value: torch.Tensor, laid: Laid) -> None:
    assert piece.fits(laid.numel), f"{piece} of {laid}"
    assert value.shape == (piece.hi - piece.lo,) and value.is_contiguous() and value.dtype == DTYPES[laid.dtype]
    assert value.data_ptr() % 64 == 0 or not value.numel()
