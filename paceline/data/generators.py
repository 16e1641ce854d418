"""Generators that a user's sampler holds: whoever draws from it draws what all others do, newcomers too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from paceline.data.order import mix
from paceline.data.random import seeded

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def held_by(sampler: Any) -> list[Any]:
    """The generators of a sampler and of those inside it, in the order of its attributes, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KINDS):
            found[id(item)] = item
        elif item is sampler or isinstance(item, Sampler):
            waiting += getattr(item, "__dict__", {}).values()
        elif isinstance(item, (list, tuple)) and item and isinstance(item[0], (Sampler, *_KINDS)):
            waiting += item
    return list(found.values())


@contextmanager
def drawing_from(sampler: Any, seed: int) -> Iterator[None]:
    """Draw from it under this seed, whatever was drawn before; all generators are left as they were."""
    held = held_by(sampler)
    before = [_state(generator) for generator in held]
    for number, generator in enumerate(held):
        _set_seed(generator, mix(seed, number))
    try:
        with seeded(seed):
            yield
    finally:
        for generator, state in zip(held, before, strict=True):
            _set_state(generator, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _set_seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)
