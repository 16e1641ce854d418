"""What a worker at its own pace does about pushes of others that came between its pull and its push. Pure.

    async+damp:0.5      the gradient counts (1 + d) ** -0.5 times, where d such pushes came
    ssp:3+dc:0.04       delay compensation (Zheng et al., DC-ASGD, 2017): g + 0.04 g g (w now - w then), element by element

Both are computed at the worker, just before it pushes, so that every copy of a fragment applies the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch

OPTIONS = {"damp": "damping", "dc": "compensation"}


@dataclass(frozen=True)
class Delays:
    damping: float = 0.0
    compensation: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.damping or self.compensation)

    def factor(self, between: int) -> float:
        """
        >>> Delays(damping=0.5).factor(3)
        0.5
        """
        return float((1 + between) ** -self.damping)

    def compensate(self, gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> None:
        """In place."""
        if self.compensation:
            gradient.addcmul_(gradient * gradient, now - then, value=self.compensation)


def split(text: str) -> tuple[str, Delays]:
    """A mode as it is written, and what is joined to it.

    >>> split("ssp:3+dc:0.04+damp:1")
    ('ssp:3', Delays(damping=1.0, compensation=0.04))
    """
    mode, *options = text.split("+")
    values: dict[str, float] = {}
    for option in options:
        name, _, number = option.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in OPTIONS or not 0 < value < 100 or OPTIONS[name] in values:
            raise UsageError(
                f"{text!r}: {option!r} cannot be joined to {mode}; write {mode}+damp:0.5, {mode}+dc:0.04, or a codec: {mode}+int8"
            )
        values[OPTIONS[name]] = value
    return mode, Delays(**values)
