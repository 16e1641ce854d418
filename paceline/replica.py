"""What is trained: the models and optimizers a script gave to prepare(), as one list of tensors."""

from __future__ import annotations

import hashlib
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
        self.params, self._frozen, self.buffers = [], [], []
        for model in self.models:
            for param in model.parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    (self.params if param.requires_grad else self._frozen).append(param)
            for buffer in model.buffers():
                if id(buffer) not in seen and buffer.dtype != torch.bool:
                    seen.add(id(buffer))
                    self.buffers.append(buffer)

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

    def weights_sha256(self) -> str:
        return weights_sha256(self.state_dict())

    def digest_of_settings(self) -> int:
        """A number for every optimizer's hyper-parameters: it must be the same on all workers."""
        digest = hashlib.blake2b(digest_size=8)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name in sorted(group):
                    if name != "params":
                        digest.update(f"{name}={_plain(group[name])};".encode())
        return int.from_bytes(digest.digest(), "little", signed=True)


def _plain(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _align(tensor: torch.Tensor) -> None:
    """Move a tensor to a 64-byte boundary: an unaligned one gives other bits (measured)."""
    if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
