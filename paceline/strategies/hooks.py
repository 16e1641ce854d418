"""Hooks on a user's model that do not follow it into copies: `best = deepcopy(model)`, `torch.save(model)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nothing(*arguments: Any) -> None:
    """What a copy's hook does."""


class Hook:
    """Calls what it was given; a deep copy does so too if `shared`, a pickled one never."""

    def __init__(self, call: Callable[..., Any] = nothing, shared: bool = False) -> None:
        self._call, self._shared = call, shared

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self if self._shared else Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
