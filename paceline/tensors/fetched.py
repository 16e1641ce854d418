"""A gradient that lies elsewhere until somebody looks at it.

It has its memory from the start; what belongs into it is fetched by whatever torch function comes first. A
script that hands its gradients to the optimizer and never looks never pays for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Fetch:
    """What several gradients wait for together: `bring` fills their memory, once."""

    def __init__(self, bring: Callable[[], None]) -> None:
        self._bring: Callable[[], None] | None = bring

    @property
    def done(self) -> bool:
        """Whether anybody has looked."""
        return self._bring is None

    def now(self) -> None:
        if self._bring is not None:
            bring, self._bring = self._bring, None
            try:
                bring()
            except BaseException:
                self._bring = bring  # nothing has come: the next look is the first
                raise


class Fetched(torch.Tensor):
    """Behaves as the plain tensor whose memory it shares."""

    fetch: Fetch

    @staticmethod
    def over(memory: torch.Tensor, fetch: Fetch) -> Fetched:
        made: Fetched = torch.Tensor._make_subclass(Fetched, memory)
        made.fetch = fetch
        return made

    def _plain(self) -> torch.Tensor:
        self.fetch.now()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    # What is copied, kept or printed is a plain tensor: it needs nobody who fetches.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for found in _inside([args, kwargs or {}]):
            found.fetch.now()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _inside(value: Any) -> Iterable[Fetched]:
    if isinstance(value, Fetched):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)
    elif isinstance(value, dict):
        yield from _inside(list(value.values()))
