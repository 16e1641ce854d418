"""What a term means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    term: int
    members: tuple[int, ...]
    """Workers by number, in the order of their ranks; the first one is main."""
