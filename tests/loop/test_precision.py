"""Mixed precision: half inside, fp32 outside, and a scale that leaves no trace in the gradient."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.loop.precision import Precision
from tests.strategies.one_worker import CPU, Driver
from tests.tensors.arithmetic import same

pytestmark = pytest.mark.filterwarnings("ignore:.*CPU Autocast.*")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Spy(nn.Module):
    """A linear layer that remembers in what precision it computed."""

    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(inputs, outputs, bias=False)
        with torch.no_grad():
            self.linear.weight.mul_(8).round_().div_(8)  # exact in every precision
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.append(y.dtype)
        return y


def small(leaf: int) -> torch.Tensor:
    """Whole numbers of a few bits, so that halves compute exactly."""
    return torch.randint(-4, 5, (2, 4), generator=torch.Generator().manual_seed(leaf)).float() / 64


def attached(kind: str, *models: nn.Module) -> Precision:
    precision = Precision(kind, CPU)
    for model in models:
        precision.attach(model)
    return precision


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_forward_pass_runs_in_half_and_its_output_is_fp32(kind: str) -> None:
    model = Spy()
    attached(kind, model)
    output = model(small(0))
    assert model.seen == [HALVES[kind]]
    assert output.dtype == torch.float32
    assert model.linear.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu"), "the loss is computed in full"
    with torch.no_grad():
        assert model(small(0)).dtype == torch.float32


def test_fp32_changes_nothing() -> None:
    model = Spy()
    precision = attached("fp32", model)
    model(small(0))
    assert model.seen == [torch.float32] and not precision.scales and precision.scale == 1.0
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert precision.after_commit(list(model.parameters())) is False


def test_inputs_need_not_be_half_already() -> None:
    model = Spy()
    attached("bf16", model)
    assert torch.equal(model(small(0)), model.linear(small(0)))


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "shape",
    [
        lambda y: (y, y),
        lambda y: [y, {"a": y}],
        lambda y: {"logits": y, "ids": torch.tensor([1]), "name": "text", "none": None},
        lambda y: Pair(y, (y,)),
    ],
    ids=["tuple", "list", "dict", "namedtuple"],
)
def test_outputs_of_any_shape_come_out_as_fp32(shape: Callable[[torch.Tensor], Any]) -> None:
    class Wrapped(Spy):
        def forward(self, x: torch.Tensor) -> Any:
            return shape(super().forward(x))

    model = Wrapped()
    attached("fp16", model)
    output = model(small(0))
    want = shape(torch.empty(0))
    assert type(output) is type(want)

    def check(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            assert value.dtype in (torch.float32, torch.int64)
        elif isinstance(value, dict):
            [check(item) for item in value.values()]
        elif isinstance(value, (list, tuple)):
            [check(item) for item in value]

    check(output)
    if isinstance(output, dict):
        assert output["ids"].tolist() == [1] and output["name"] == "text" and output["none"] is None


def test_a_forward_that_fails_leaves_autocast() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("in the model")

    model, after = Broken(), Spy()
    attached("bf16", model, after)
    with pytest.raises(KeyError, match="in the model"):
        model(small(0))
    assert not torch.is_autocast_enabled("cpu")
    after(small(0))
    assert after.seen == [torch.bfloat16] and not torch.is_autocast_enabled("cpu")


def test_a_prepared_model_inside_another_is_no_harm() -> None:
    inner = Spy(4, 4)
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    attached("bf16", outer, inner)
    assert outer(small(0)).dtype == torch.float32
    assert inner.seen == [torch.bfloat16] and not torch.is_autocast_enabled("cpu")


# the scale


def train(kind: str, scale: float | None, leaves: int, loss: Callable[[nn.Module, int], torch.Tensor]) -> Any:
    model = Spy()
    precision = attached(kind, model)
    if scale is not None:
        precision.scale = scale
    driver = Driver([model], scaled=precision if precision.scales else None)
    driver.step(leaves, lambda leaf: loss(model, leaf).backward())
    skipped = precision.after_commit(driver.replica.params)
    driver.close()
    return model.linear.weight.grad, precision, skipped


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_scaling_up_and_down_is_exact(leaves: int) -> None:
    """Gradients that halves hold exactly at every scale come out the same, to the bit."""

    def loss(model: nn.Module, leaf: int) -> torch.Tensor:
        return model(small(leaf)).sum() / 1024

    want, _, _ = train("fp32", None, leaves, loss)
    assert want is not None and want.abs().max() > 0
    for scale in (1.0, 1024.0, None):
        got, precision, skipped = train("fp16", scale, leaves, loss)
        assert not skipped and precision.skipped == 0
        assert same(got, want)


def test_the_scale_saves_what_fp16_would_lose() -> None:
    def loss(model: nn.Module, leaf: int) -> torch.Tensor:
        return model(small(leaf)).sum() * 2.0**-30

    want, _, _ = train("fp32", None, 2, loss)
    lost, _, _ = train("fp16", 1.0, 2, loss)
    kept, _, _ = train("fp16", None, 2, loss)
    assert lost is not None and not lost.any(), "below the smallest fp16"
    assert same(kept, want)


def test_an_overflow_drops_the_step_and_halves_the_scale() -> None:
    model = Spy()
    precision = attached("fp16", model)
    driver = Driver([model], scaled=precision)
    scales, skips = [], []
    for _ in range(4):
        driver.step(2, lambda leaf: (model(small(leaf)).sum() * 3.0).backward())
        skips.append(precision.after_commit(driver.replica.params))
        scales.append(precision.scale)
        assert (model.linear.weight.grad is None) == skips[-1], "the optimizer has nothing to apply"
    # 65536 × 3 and 32768 × 3 are beyond fp16's 65504; 16384 × 3 is not.
    assert skips == [True, True, False, False]
    assert scales == [32768.0, 16384.0, 16384.0, 16384.0]
    assert precision.skipped == 2
    want, _, _ = train("fp32", None, 2, lambda model, leaf: model(small(leaf)).sum() * 3.0)
    assert same(model.linear.weight.grad, want)
    driver.close()


def test_the_scale_stays_at_one_at_least_and_grows_after_many_good_steps() -> None:
    precision = Precision("fp16", CPU)
    param = nn.Parameter(torch.zeros(1))
    for _ in range(20):
        param.grad = torch.tensor([float("nan")])
        assert precision.after_commit([param]) is True
        assert param.grad is None
    assert precision.scale == 1.0 and precision.skipped == 20
    for _ in range(1999):
        assert precision.after_commit([param]) is False
    assert precision.scale == 1.0
    precision.after_commit([param])
    assert precision.scale == 2.0


def test_an_overflow_in_a_sparse_gradient_is_seen() -> None:
    precision = Precision("fp16", CPU)
    param = nn.Parameter(torch.zeros(3, 1))
    with torch.sparse.check_sparse_tensor_invariants():
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[float("inf")]]), (3, 1))
        assert precision.after_commit([param]) is True


def test_a_gradient_through_two_prepared_models_is_scaled_once() -> None:
    """An encoder and a decoder, or a generator and its critic, each given to prepare()."""

    def grads(kind: str) -> tuple[list[Any], bool]:
        first, second = Spy(4, 4), Spy(4, 3)
        precision = attached(kind, first, second)
        driver = Driver([first, second], scaled=precision if precision.scales else None)
        driver.step(2, lambda leaf: (second(first(small(leaf))).sum() / 1024).backward())
        skipped = precision.after_commit(driver.replica.params)
        driver.close()
        return driver.grads(), skipped

    want, _ = grads("fp32")
    got, skipped = grads("fp16")
    assert not skipped, "the first model's gradient was scaled by both and overflowed"
    for one, two in zip(got, want, strict=True):
        assert torch.allclose(one, two, rtol=1e-2)
