"""Values and codecs to try: drawn by hypothesis, with the awkward ones among them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from paceline.tensors.codecs import parse
from paceline.tensors.codecs.base import HUGE, Codec, Shapes, count

NAMES = [
    "fp16",
    "bf16",
    "int8",
    "fp8",
    "topk:0.01",
    "topk:0.3",
    "randomk:0.01",
    "randomk:0.5",
    "powersgd:1",
    "powersgd:2",
    "onebit",
]
WITH_FEEDBACK = [name for name in NAMES if parse(name).feedback]

SHAPES: list[Shapes] = [
    [],
    [(0,)],
    [(1,)],
    [()],
    [(255,)],
    [(256,), (1,)],
    [(1023,), (0, 4), (2,)],
    [(3, 5), (5,)],
    [(20, 30), (30,), (7, 3, 4, 4)],
    [(40, 41)],
]
shapes = st.sampled_from(SHAPES)
codecs = st.sampled_from(NAMES).map(parse)
seeds = st.integers(0, 2**31)


def some_values(shapes: Shapes, seed: int, kind: str) -> torch.Tensor:
    """Of one kind; `mixed` has all sizes beside each other."""
    total = count(shapes)
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(total, generator=random)
    if kind == "zeros":
        return torch.zeros(total)
    if kind == "denormal":
        return torch.randint(-300, 300, (total,), generator=random, dtype=torch.int32).float() * 2.0**-149
    if kind == "large":
        return normal.clamp(-1, 1) * HUGE
    if kind == "equal":
        return torch.randint(-1, 2, (total,), generator=random).float()
    if kind == "mixed":
        return normal * 10.0 ** torch.randint(-30, 20, (total,), generator=random)
    return normal


kinds = st.sampled_from(["normal", "zeros", "denormal", "large", "equal", "mixed"])


@st.composite
def tries(draw: st.DrawFn) -> tuple[Codec, Shapes, torch.Tensor, int]:
    shape, seed = draw(shapes), draw(seeds)
    return draw(codecs), shape, some_values(shape, seed, draw(kinds)), seed
