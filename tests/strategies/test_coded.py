"""All-reduce with a codec: .grad is what the shares' messages decode to; what is kept goes where the run goes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.strategies import create, find
from paceline.tensors.snapshot import Snapshot
from tests.strategies.one_worker import Driver
from tests.tensors.arithmetic import same
from tests.tensors.together import Member, together

_MODEL = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))
CODECS = ["bf16", "int8", "topk:0.05", "randomk:0.2", "powersgd:1", "onebit"]


def worker(peers: Any, codec: str) -> Driver:
    return Driver([copy.deepcopy(_MODEL)], peers, strategy=f"allreduce+{codec}")


def train(driver: Driver, steps: int, leaves: int = 4) -> list[torch.Tensor]:
    """Steps of SGD; the weights."""
    net = driver.replica.models[0]

    def backward(leaf: int) -> None:
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * driver.number + leaf))
        net(x).pow(2).mean().backward()

    for _ in range(steps):
        driver.step(leaves, backward)
        with torch.no_grad():
            for param, grad in zip(driver.replica.params, driver.grads(), strict=True):
                assert grad is not None
                param.sub_(0.1 * grad)
    return [*driver.replica.params, *driver.replica.buffers]


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_weights_at_any_worker_count(codec: str) -> None:
    def work(peers: Member) -> list[torch.Tensor]:
        driver = worker(peers, codec)
        weights = train(driver, 5)
        driver.close()
        return weights

    (alone,) = together(1, work)
    for weights in together(2, work):
        assert all(same(a, b) for a, b in zip(weights, alone, strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_a_run_goes_on_from_what_was_written_down(codec: str) -> None:
    one = worker(None, codec)
    train(one, 3)
    captured = Snapshot.read(memoryview(Snapshot(one.strategy.capture()).packed())).tree
    other = Driver([copy.deepcopy(one.replica.models[0])], strategy=f"allreduce+{codec}")
    other.strategy.restore(captured)
    other.number = one.number
    for a, b in zip(train(one, 3), train(other, 3), strict=True):
        assert same(a, b)
    if create(f"allreduce+{codec}")._codec.feedback:  # type: ignore[attr-defined]
        forgetful = Driver([copy.deepcopy(_MODEL)], strategy=f"allreduce+{codec}")
        assert captured["kept"] and not forgetful.strategy.capture()["kept"]


def test_a_second_worker_does_not_make_the_first_forget() -> None:
    """A run of one has no hooks; they come, with a new reducer, when it gets company."""
    alone, growing = worker(None, "topk:0.05"), worker(None, "topk:0.05")
    train(alone, 3)
    train(growing, 3)
    growing.strategy._build()  # type: ignore[attr-defined]
    for a, b in zip(train(alone, 2), train(growing, 2), strict=True):
        assert same(a, b)


def test_what_was_kept_of_another_model_is_refused() -> None:
    one = worker(None, "int8")
    train(one, 1)
    other = Driver([nn.Linear(12, 3)], strategy="allreduce+int8")
    other.strategy.restore(one.strategy.capture())
    with pytest.raises(UsageError, match="go on with the model it was written with"):
        train(other, 1)


def test_scaled_gradients_are_refused_with_a_way_out() -> None:
    class Scale:
        scale = 1024.0

    with pytest.raises(UsageError, match="--precision bf16"):
        Driver([copy.deepcopy(_MODEL)], scaled=Scale(), strategy="allreduce+int8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("allreduce+int9", "unknown codec 'int9'; did you mean 'int8'\\? There are: fp16 "),
        ("allreduce+topk", "write topk:0.01"),
        ("allreduce+int8+topk:0.1", r"one codec; write allreduce\+topk:0.1"),
        ("ps+int9", "unknown codec 'int9'"),
        ("async+int8+damp:0.5", r"a codec comes last; write async\+damp:0.5\+int8"),
        ("ps+backup:1+int8", r"steps behind.*write ps\+backup:1, or ps\+int8"),
        ("federated:rounds=3+int8", r"nothing from round to round.*write federated:rounds=3$"),
        ("allreduce+damp:1", "only workers at their own pace"),
        ("int8", "unknown strategy 'int8'"),
        ("ps+int8+rows:2", r"a codec comes last; write ps\+rows:2\+int8"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_the_nearest_that_can(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(text)


def test_delays_stand_behind_a_number_too() -> None:
    assert find("ssp:3+dc:0.04").name == "FreeRunning"
    assert find("ssp:3+dc:0.04+topk:0.01").name == "CodedFree"
