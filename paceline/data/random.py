"""Random state as a function of (seed, step, slot), so that it never depends on who computes what."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_cpu = torch.default_generator

IN_SHARE, OUTSIDE = 1, 2
"""Keep the seeds of shares and of the code around them apart."""


def set_seed(seed: int, device: torch.device | None = None) -> None:
    """Seed every global generator a script may draw from (7 µs; torch.manual_seed alone is 110)."""
    _cpu.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def next_draws() -> tuple[int, float, float]:
    """The next number of each generator: after a known seed, it tells whether anything was drawn."""
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=_cpu))
    return drawn, random.random(), float(np.random.random())


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw under `seed`, and leave the global generators as they were."""
    before = _cpu.get_state(), random.getstate(), np.random.get_state()
    cuda = None if device is None or device.type != "cuda" else torch.cuda.get_rng_state(device)
    set_seed(seed, device)
    try:
        yield
    finally:
        _cpu.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device or "cuda")
