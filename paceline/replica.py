"""What is trained: the models and optimizers a script gave to prepare(), as one list of tensors."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.state.hash import weights_sha256


class Replica:
    """This worker's copy of everything that must be equal on all workers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.params: list[nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self.buffer_homes: list[tuple[nn.Module, str]] = []
        self._frozen: list[nn.Parameter] = []

    def add_model(self, model: nn.Module) -> None:
        model.to(self.device)
        self.models.append(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_complex():
                raise UsageError(f"{name} is complex; Paceline adds up real tensors only (view_as_real helps)")
            _align(tensor)
        self.find_trainable()

    def find_trainable(self) -> None:
        """List what is trained now: shared parameters once, frozen ones left out."""
        seen: set[int] = set()
        self.params, self._frozen, self.buffers, self.buffer_homes = [], [], [], []
        for model in self.models:
            for param in model.parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    (self.params if param.requires_grad else self._frozen).append(param)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen and buffer.dtype != torch.bool:
                        seen.add(id(buffer))
                        self.buffers.append(buffer)
                        self.buffer_homes.append((module, name))

    @property
    def thawed(self) -> bool:
        """Whether a frozen parameter has become trainable since they were listed."""
        return any(param.requires_grad for param in self._frozen)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every model's tensors; a second model's names start with its number."""
        state: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"{number}."
            for name, value in model.state_dict().items():
                if isinstance(value, torch.Tensor):
                    state[prefix + name] = value
        return state

    def capture(self) -> dict[str, Any]:
        """Everything that must be equal on all workers, as tensors and plain values."""
        return {
            "tensors": self._all_tensors(),
            "names": self._names(),
            "trained": [param.requires_grad for model in self.models for param in model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self._all_tensors(), state["tensors"], strict=True):
                mine.copy_(theirs)
        everything = [param for model in self.models for param in model.parameters()]
        for param, trained in zip(everything, state["trained"], strict=True):
            param.requires_grad_(trained)  # the strategy looks again before the next step
        for optimizer, theirs in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, theirs)
        for scheduler, theirs in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)

    def _all_tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, those too that a state_dict leaves out."""
        found: dict[int, torch.Tensor] = {}
        for model in self.models:
            for tensor in [*model.parameters(), *model.buffers()]:
                found.setdefault(id(tensor), tensor.data if isinstance(tensor, nn.Parameter) else tensor)
        return list(found.values())

    def _names(self) -> dict[str, int]:
        """Which of all tensors each name of the state dict means, for who wants the weights alone."""
        numbers: dict[int, int] = {}
        names: dict[str, int] = {}
        for model in self.models:
            for tensor in [*model.parameters(), *model.buffers()]:
                numbers.setdefault(id(tensor), len(numbers))
        for number, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"{number}."
            kept = model.state_dict().keys()
            named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
            for name, tensor in itertools.chain(*named):
                if name in kept:
                    names[prefix + name] = numbers[id(tensor)]
        return names

    def weights_sha256(self) -> str:
        return weights_sha256(self.state_dict())

    def digest_of_settings(self) -> int:
        """A number for every optimizer's hyper-parameters: it must be the same on all workers."""
        digest = hashlib.blake2b(digest_size=8)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name in sorted(group):
                    if name != "params":
                        digest.update(f"{name}={_words(group[name])};".encode())
        return int.from_bytes(digest.digest(), "little", signed=True)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Bit for bit: torch's own load_state_dict casts an optimizer's state to its parameter's type."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(state)
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for group, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in theirs.items() if name != "params"})
    optimizer.state.clear()
    for number, values in state["state"].items():
        param = params[number]
        optimizer.state[param] = {
            name: value.to(param.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in values.items()
        }


def _words(value: Any) -> str:
    """A value as text that is the same in every process; an object of the optimizer's own has none."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_words, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_words(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, (type(None), bool, int, float, str)) else type(value).__name__


def _align(tensor: torch.Tensor) -> None:
    """Move a tensor to a 64-byte boundary: an unaligned one gives other bits (measured)."""
    if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
