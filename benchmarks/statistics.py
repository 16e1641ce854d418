"""Medians of ratios, with how sure one can be of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(median of the paired ratios, lower and upper 95 % bound by bootstrap over the pairs)."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[-101]


def median_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The same of the paired differences."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(differences, k=len(differences))) for _ in range(1000))
    return statistics.median(differences), medians[25], medians[-26]


def words(name: str, ours: Sequence[float], theirs: Sequence[float], limit: float | None = None) -> str:
    ratio, low, high = median_ratio(ours, theirs)
    verdict = "" if limit is None else f"  limit {limit}: {'holds' if high <= limit else 'MISSED'}"
    return (
        f"{name}: {statistics.median(ours) * 1e3:.3f} ms against {statistics.median(theirs) * 1e3:.3f} ms a step, "
        f"ratio {ratio:.3f} [{low:.3f}, {high:.3f}] over {len(ours)} pairs{verdict}"
    )
