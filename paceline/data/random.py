"""Random state as a function of (seed, step, slot), so that it never depends on who computes what."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from paceline.data.twisters import find

_twisters = find()
_fresh = b""
"""How they all were when the last seed was set."""

IN_SHARE, OUTSIDE = 1, 2
"""Keep the seeds of shares and of the code around them apart."""


def set_seed(seed: int, device: torch.device | None = None) -> None:
    """Seed every global generator a script may draw from (4 µs; torch.manual_seed alone is 110)."""
    global _fresh
    _twisters.seed(seed, _fresh)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    _fresh = _twisters.read()


def set_known_seed(seed: int) -> None:
    """The same for code that will hardly draw: what is untouched stays as it is, except torch's seed, which can be read."""
    global _fresh
    if untouched():
        _twisters.name(seed)
        _fresh = _twisters.read()
    else:
        set_seed(seed)


def untouched() -> bool:
    """Whether nothing was drawn since a seed was set."""
    return _twisters.read() == _fresh


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw under `seed`, and leave the global generators as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = None if device is None or device.type != "cuda" else torch.cuda.get_rng_state(device)
    set_seed(seed, device)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device or "cuda")
