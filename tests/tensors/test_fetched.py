"""A gradient that lies elsewhere: whatever looks first brings it, once; whatever does not look brings nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.tensors.fetched import Fetch, Fetched
from tests.tensors.arithmetic import bits

BROUGHT = [torch.arange(6, dtype=torch.float32).reshape(2, 3) + 1, torch.tensor([-2.0, 0.5])]


class Model:
    """Two parameters whose gradients are to be fetched together."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]
        self.memory = [torch.full_like(param.detach(), float("nan")) for param in self.params]
        self.brought = 0
        self.fetch = Fetch(self._bring)
        for param, memory in zip(self.params, self.memory, strict=True):
            param.grad = Fetched.over(memory, self.fetch)

    def _bring(self) -> None:
        self.brought += 1
        for memory, value in zip(self.memory, BROUGHT, strict=True):
            memory.copy_(value)

    @property
    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda grad: grad.data,
    "detach": lambda grad: grad.detach(),
    "arithmetic": lambda grad: grad * 2,
    "arithmetic from the right": lambda grad: 1 - grad,
    "an operator of torch": lambda grad: torch.add(grad, 1),
    "a comparison": lambda grad: grad == 1,
    "in place": lambda grad: grad.mul_(2),
    "index": lambda grad: grad[0],
    "item": lambda grad: grad.sum().item(),
    "norm": lambda grad: grad.norm(),
    "clone": lambda grad: grad.clone(),
    "view": lambda grad: grad.view(-1),
    "to": lambda grad: grad.to(torch.float64),
    "a list in foreach": lambda grad: torch._foreach_norm([grad])[0],
    "a list in stack": lambda grad: torch.stack([grad, grad]),
    "out": lambda grad: torch.neg(grad, out=torch.empty(2, 3)),
    "copy_ into another": lambda grad: torch.empty(2, 3).copy_(grad),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "repr": repr,
    "str": lambda grad: f"{grad}",
    "numpy": lambda grad: grad.numpy().tolist(),
    "tolist": lambda grad: grad.tolist(),
    "iteration": lambda grad: [row.tolist() for row in grad],
    "isfinite": lambda grad: torch.isfinite(grad).all(),
    "a function of nn": nn.functional.relu,
}


@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_first_sees_what_a_plain_gradient_would_show_and_brings_it_once(look: str) -> None:
    model = Model()
    seen = LOOKS[look](model.grads[0])
    assert listed(seen) == listed(LOOKS[look](BROUGHT[0].clone())) and model.brought == 1
    LOOKS[look](model.grads[0])
    model.grads[1].sum()
    assert model.brought == 1, "all of them came together"


def test_clipping_by_norm_and_by_value() -> None:
    model, plain = Model(), [value.clone() for value in BROUGHT]
    norm = nn.utils.clip_grad_norm_(model.params, 1.0)
    want = torch.stack([value.norm() for value in plain]).norm()
    assert torch.equal(norm, want) and model.brought == 1
    expected = [nn.Parameter(torch.ones_like(value)) for value in plain]
    for param, value in zip(expected, plain, strict=True):
        param.grad = value
    nn.utils.clip_grad_norm_(expected, 1.0)
    assert [bits(grad) for grad in model.grads] == [bits(value) for value in plain]
    nn.utils.clip_grad_value_(model.params, 0.1)
    assert all(bool((grad.abs() <= torch.tensor(0.1)).all()) for grad in model.grads) and model.brought == 1


def test_what_is_changed_in_place_is_changed_in_the_one_memory() -> None:
    model = Model()
    model.grads[0].data.mul_(3)
    assert model.memory[0].tolist() == (BROUGHT[0] * 3).tolist() == model.grads[0].tolist()
    assert model.brought == 1


def test_an_optimizer_of_the_script_sees_it() -> None:
    """One that servers do not run."""
    model = Model()
    torch.optim.Rprop(model.params, lr=0.1).step()
    assert model.brought == 1
    assert all(torch.isfinite(param).all() for param in model.params)


DOES_NOT_LOOK: dict[str, Callable[[Model], Any]] = {
    "zero_grad": lambda model: torch.optim.SGD(model.params).zero_grad(set_to_none=True),
    "hooks of an optimizer that do nothing": lambda model: torch.optim.SGD(model.params).register_step_pre_hook(
        lambda *given: None
    ),
    "is None": lambda model: model.params[0].grad is not None,
    "isinstance": lambda model: isinstance(model.params[0].grad, torch.Tensor),
    "handing it on": lambda model: [param.grad for param in model.params],
    "moving it to another parameter": lambda model: setattr(model.params[0], "grad", model.params[0].grad),
}


@pytest.mark.parametrize("action", DOES_NOT_LOOK)
def test_what_does_not_look_brings_nothing(action: str) -> None:
    model = Model()
    DOES_NOT_LOOK[action](model)
    assert model.brought == 0 and not model.fetch.done


def test_a_fetch_that_fails_says_so_and_is_tried_again_by_the_next_look() -> None:
    model, failures = Model(), [ConnectionError("gone")]

    def bring() -> None:
        if failures:
            raise failures.pop()
        model.memory[0].copy_(BROUGHT[0])

    model.params[0].grad = Fetched.over(model.memory[0], Fetch(bring))
    assert model.params[0].grad is not None
    with pytest.raises(ConnectionError, match="gone"):
        model.params[0].grad.sum()
    assert model.params[0].grad.sum().item() == BROUGHT[0].sum().item()


def test_a_copy_is_plain_and_lives_by_itself() -> None:
    model = Model()
    clone, deep = model.grads[0].clone(), copy.deepcopy(model.grads[1])
    model.grads[0].zero_()
    model.grads[1].zero_()
    assert type(clone) is type(deep) is type(saved(model.grads[0])) is torch.Tensor
    assert bits(clone) == bits(BROUGHT[0]) and bits(deep) == bits(BROUGHT[1])
