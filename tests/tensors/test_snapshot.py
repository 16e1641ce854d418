"""State as bytes: what is written comes back, in memory of its own, and what cannot be is refused by name."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import UsageError
from paceline.tensors.snapshot import Snapshot
from tests.tensors.arithmetic import same


def there_and_back(tree: Any) -> Any:
    snapshot = Snapshot(tree)
    memory = bytearray(b"\xaa" * snapshot.nbytes)
    with memoryview(memory) as view:
        snapshot.write(view)
        back = Snapshot.read(view).tree
    memory[:] = b"\x55" * len(memory)  # what came back must not care
    return back


def alike(left: Any, right: Any) -> bool:
    """Equal in kind too: 1 is not True, (1,) is not [1], and tensors are compared by their bits."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and [(type(k), k) for k in left] == [(type(k), k) for k in right]
            and all(alike(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(alike(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and bool(left == right)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [],
        (),
        {"a": {0: {1: "x"}, 1: [], -5: ()}},
        {(1, "b"): 3, None: 4, True: 5, 2.5: 6, b"k": 7},
        [True, 1, 1.0, None, "größe", b"\x00\xff", -0.0, math.inf, math.nan],
        ((), ((),), [(), [[]]]),
        ["t", 0],
        ["d", []],
        ("l", ["l"]),
        -(1 << 63),
        (1 << 64) - 1,
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(tree: Any) -> None:
    """Lists that look like the snapshot's own marks too."""
    assert alike(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5,), (4, 3, 2)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 7 - 3).reshape(shape).to(dtype)
    assert alike(there_and_back({"one": tensor, "again": [tensor]}), {"one": tensor, "again": [tensor]})


def test_odd_bits_of_floats_survive() -> None:
    tensor = torch.tensor([-0.0, math.nan, math.inf, 1e-45])
    tensor.view(torch.int32)[1] = 0x7FC12345  # a NaN that carries something
    assert same(there_and_back(tensor), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(4, 3),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(10)[7:],
        nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0, requires_grad=True) * 2,
    ],
    ids=["transposed", "stepped", "expanded", "channels last", "a window", "a parameter", "a result"],
)
def test_tensors_in_any_shape_of_memory(tensor: torch.Tensor) -> None:
    back = there_and_back([tensor])[0]
    assert torch.equal(back, tensor)
    assert not back.requires_grad and back.data_ptr() % 64 == 0


def test_what_comes_back_is_private() -> None:
    """Not of the first tree, not of the memory between, and each tensor by itself."""
    tensor = torch.arange(4.0)
    snapshot = Snapshot({"a": tensor, "b": tensor})
    memory = memoryview(bytearray(snapshot.nbytes))
    snapshot.write(memory)
    one, two = Snapshot.read(memory).tree, Snapshot.read(memory).tree
    memory[:] = bytes(len(memory))
    tensor.fill_(-1)
    one["a"].add_(10)
    assert one["a"].tolist() == [10, 11, 12, 13]
    assert one["b"].tolist() == two["a"].tolist() == [0, 1, 2, 3]


def test_a_snapshot_holds_what_its_tensors_are_when_it_is_written() -> None:
    tensor = torch.zeros(2)
    snapshot = Snapshot([tensor])
    tensor.fill_(3)
    memory = memoryview(bytearray(snapshot.nbytes))
    snapshot.write(memory)
    assert Snapshot.read(memory).tree[0].tolist() == [3, 3]


def test_kinds_of_dicts_and_numbers_become_plain() -> None:
    tree = there_and_back({"o": OrderedDict(b=1, a=2), "n": np.float32(0.5), "i": np.int64(7), "b": np.bool_(True)})
    assert alike(tree, {"o": {"b": 1, "a": 2}, "n": 0.5, "i": 7, "b": True})


# what training keeps


def trained(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).to(memory_format=torch.channels_last)
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 2, 4, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, betas=(0.8, 0.99)),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    state = optimizer.state_dict()
    back = there_and_back({"model": model.state_dict(), "optimizer": state})
    assert alike(back["optimizer"], state)
    assert alike(back["model"], dict(model.state_dict()))
    _, other = trained(OPTIMIZERS[name])
    other.load_state_dict(back["optimizer"])
    assert alike(other.state_dict(), state)


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "multi-step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_where_they_were(name: str) -> None:
    pairs = []
    for _ in range(2):
        optimizer = trained(OPTIMIZERS["SGD with momentum"])[1]
        pairs.append((optimizer, SCHEDULERS[name](optimizer)))
    (optimizer, scheduler), (other, newcomer) = pairs

    def step(one: torch.optim.Optimizer, by: Any) -> float:
        one.step()
        by.step(*([1.0] if name == "plateau" else []))
        return float(one.param_groups[0]["lr"])

    for _ in range(3):
        step(optimizer, scheduler)
    back = there_and_back({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    other.load_state_dict(back["optimizer"])
    newcomer.load_state_dict(back["scheduler"])
    assert [step(optimizer, scheduler) for _ in range(6)] == [step(other, newcomer) for _ in range(6)]


# refusals


@pytest.mark.parametrize(
    ("tree", "kind", "path"),
    [
        (object(), "object", "its top"),
        ({"model": {"extra": {1, 2}}}, "set", "model.extra"),
        ({"a": [0, (1, {"b": len})]}, "builtin_function_or_method", "a[1][1].b"),
        ([np.zeros(2)], "ndarray", "[0]"),
        ({"state": {3: {"exp": torch.float32}}}, "dtype", "state.3.exp"),
        ({"at": 1 + 2j}, "complex", "at"),
    ],
    ids=["top", "set", "function", "array", "dtype", "complex"],
)
def test_a_value_that_cannot_travel_is_named(tree: Any, kind: str, path: str) -> None:
    with pytest.raises(UsageError) as refused:
        Snapshot(tree)
    assert f"has a {kind} at {path}:" in str(refused.value)
    assert "leave it out of state_dict()" in str(refused.value)


# anything

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensor = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


numbers = st.integers(-(1 << 63), (1 << 64) - 1)
plain = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
keys = st.integers(-9, 9) | st.text(max_size=3) | st.binary(max_size=3) | st.none()
trees = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert alike(there_and_back(tree), tree)


def test_a_state_that_has_lost_its_front_or_its_end_is_refused() -> None:
    body = bytes(Snapshot({"a": torch.arange(100.0), "b": "words"}).packed())
    for damaged in (body[8:], body[64:], body[:-1], body[:-8], b"", body + b"\0"):
        with pytest.raises(ValueError):
            Snapshot.read(memoryview(damaged))
