"""What is trained: the models and optimizers a script gave to prepare(), as one list of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import UsageError
from paceline.state.hash import weights_sha256

Home: TypeAlias = tuple[dict[str, Any], str]
"""Where a module looks for a tensor of its own: by this name, in this dict."""
_ANOTHER_MODEL = "a run goes on with the model that it was begun with"


class Replica:
    """This worker's copy of everything that must be equal on all workers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.params: list[nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self.buffer_homes: list[Home] = []
        self.registered: list[torch.Tensor] = []
        """Of modules that the script has named beside the prepared ones: an average of the weights, say."""
        self.registered_homes: list[Home] = []
        self._frozen: list[nn.Parameter] = []

    def add_model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UsageError(
                    f"{name or 'the model'} is a SyncBatchNorm, which needs a process group of torch.distributed; here it would "
                    "silently see one share at a time, as BatchNorm does: leave out convert_sync_batchnorm(), or use GroupNorm"
                )
        model.to(self.device)
        self.models.append(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_complex():
                raise UsageError(f"{name} is complex; Paceline adds up real tensors only (view_as_real helps)")
            _align(tensor)
        self.find_trainable()
        self._list_buffers(model)

    def find_trainable(self) -> None:
        """List what is trained now: shared parameters once, frozen ones left out."""
        params = {id(param): param for model in self.models for param in model.parameters()}
        self.params = [param for param in params.values() if param.requires_grad]
        self._frozen = [param for param in params.values() if not param.requires_grad]

    def _list_buffers(self, model: nn.Module) -> None:
        """Once: one that a model makes later, or gives another shape, is a cache, of which each worker has its own."""
        seen = {id(tensor) for tensor in [*self.buffers, *model.parameters()]}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen and buffer.dtype != torch.bool:
                    seen.add(id(buffer))
                    self.buffers.append(buffer)
                    self.buffer_homes.append((module._buffers, name))

    def find_registered(self, items: Iterable[Any]) -> None:
        """List what numbers modules among these have that no prepared model has, each once."""
        mine = [tensor for tensor in (*self.params, *self._frozen, *self.buffers) if tensor.layout == torch.strided]
        theirs = {tensor.untyped_storage().data_ptr() for tensor in mine}
        seen: set[int] = set()
        for module in (module for item in items if isinstance(item, nn.Module) for module in item.modules()):
            for home in (module._parameters, module._buffers):
                for name, tensor in home.items():
                    if tensor is None or id(tensor) in seen or not _has_numbers(tensor):
                        continue
                    seen.add(id(tensor))
                    if tensor.untyped_storage().data_ptr() not in theirs:
                        self.registered.append(tensor)
                        self.registered_homes.append((home, name))

    @property
    def thawed(self) -> bool:
        """Whether a frozen parameter has become trainable since they were listed."""
        return any(param.requires_grad for param in self._frozen)

    def refuse_thawed(self, strategy: str) -> None:
        """Where workers do not meet in a step, the others would not know."""
        if self.thawed:
            raise UsageError(
                f"a frozen parameter has become trainable, and the others do not know: with --strategy {strategy} all that "
                "will ever be trained must be so when the loop begins"
            )

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
        tensors: list[torch.Tensor] = []
        numbers: dict[int, int] = {}

        def number(tensor: torch.Tensor) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(tensors)
                tensors.append(tensor.data if isinstance(tensor, nn.Parameter) else tensor)
            return numbers[id(tensor)]

        params = self._named_params()
        found: dict[str, int | None] = {name: number(param) for name, param in params.items()}
        buffers = {
            f"{path}.{name}": None if buffer is None else number(buffer)
            for path, module in self._modules()
            for name, buffer in module._buffers.items()
        }
        return {
            "parameters": found,
            "buffers": buffers,
            "names": self._weights_of(found | buffers),
            "tensors": tensors,
            "trained": {name: param.requires_grad for name, param in params.items()},
            "at_rest": [path for path, module in self._modules() if not module.training],
            "optimizers": [_state_of(optimizer) for optimizer in self.optimizers],
            "groups": [_group_names(optimizer, params) for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def gradients(self, stepped: Container[int]) -> dict[str, Any]:
        """Those that no optimizer has used yet; of these have. What is left over from a step that was made is cleared before
        the next one, by any script that means to train."""
        used = {
            id(param)
            for optimizer in self.optimizers
            if id(optimizer) in stepped
            for group in optimizer.param_groups
            for param in group["params"]
        }
        params = self._named_params()
        there = {name: param.grad for name, param in params.items() if param.grad is not None}
        return {
            "gradients": {name: _packed(grad) for name, grad in there.items() if id(params[name]) not in used},
            # Cleared they may be zeros, which an optimizer takes for a gradient, unlike none.
            "used": [name for name, grad in there.items() if id(params[name]) in used and grad.layout == torch.strided],
        }

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self._restore_parameters(state)
            self._restore_buffers(state)
        params = self._named_params()
        for name, param in params.items():
            param.grad = _unpacked(state.get("gradients", {}).get(name), param.device)
        for name in state.get("used", ()):
            params[name].grad = torch.zeros_like(params[name])
        at_rest = set(state["at_rest"])
        for path, module in self._modules():
            module.training = path not in at_rest
        for optimizer, groups, theirs in zip(self.optimizers, state["groups"], state["optimizers"], strict=True):
            _regroup(optimizer, groups, params)
            load_optimizer(optimizer, theirs)
        for scheduler, theirs in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)

    def _restore_parameters(self, state: dict[str, Any]) -> None:
        mine = self._named_params()
        if odd := mine.keys() ^ state["parameters"].keys():
            where = "the model here" if odd & mine.keys() else "the run's state"
            raise UsageError(f"only {where} has a parameter {_short(min(odd))}: {_ANOTHER_MODEL}")
        for name, number in state["parameters"].items():
            param, theirs = mine[name], state["tensors"][number]
            if param.shape != theirs.shape:
                raise UsageError(
                    f"the parameter {_short(name)} has the shape {tuple(param.shape)} here, and {tuple(theirs.shape)} in the "
                    f"run's state: {_ANOTHER_MODEL}"
                )
            param.copy_(theirs)
            param.requires_grad_(state["trained"][name])  # the strategy looks again before the next step

    def _restore_buffers(self, state: dict[str, Any]) -> None:
        """By name: a model may have filled one since, made another one, or let one grow."""
        modules, lasting = dict(self._modules()), set(state["names"].values())
        for name, number in state["buffers"].items():
            path, _, leaf = name.rpartition(".")
            if path not in modules:
                raise UsageError(f"only the run's state has a buffer {_short(name)}: {_ANOTHER_MODEL}")
            home = modules[path]
            mine, theirs = home._buffers.get(leaf), None if number is None else state["tensors"][number]
            if mine is not None and theirs is not None and mine.shape == theirs.shape and mine.dtype == theirs.dtype:
                mine.copy_(theirs)
            else:
                own = None if theirs is None else theirs.to(self.device)
                home.register_buffer(leaf, own, persistent=own is None or number in lasting)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All of them, by model and path."""
        for number, model in enumerate(self.models):
            for path, module in model.named_modules(remove_duplicate=False):
                yield f"{number}.{path}".rstrip("."), module

    def _named_params(self) -> dict[str, nn.Parameter]:
        return {
            f"{path}.{name}": param
            for path, module in self._modules()
            for name, param in module._parameters.items()
            if param is not None
        }

    def _weights_of(self, numbers: dict[str, int | None]) -> dict[str, int]:
        """Which of all tensors each name of the state dict means, for who wants the weights alone."""
        names: dict[str, int] = {}
        for model_number, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"{model_number}."
            for name in model.state_dict():
                number = numbers.get(f"{model_number}.{name}")
                if number is not None:
                    names[prefix + name] = number
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


def _has_numbers(tensor: torch.Tensor) -> bool:
    return (
        not is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel() > 0 and tensor.dtype != torch.bool
    ) and not tensor.is_complex()


def _packed(grad: torch.Tensor) -> Any:
    """Plain tensors: rows of a sparse one lie beside their numbers."""
    if not grad.is_sparse:
        return grad.detach()
    return [grad._indices(), grad._values(), list(grad.shape)]


def _unpacked(known: Any, device: torch.device) -> torch.Tensor | None:
    if known is None or isinstance(known, torch.Tensor):
        return None if known is None else known.to(device)
    indices, values, shape = known
    return torch.sparse_coo_tensor(indices, values, shape, device=device)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without functions in its groups: a newcomer's script has put its own there."""
    state = optimizer.state_dict()
    groups = [{name: value for name, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _group_names(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter]) -> list[list[str]]:
    """The parameters of each group by name; one that is in no prepared model has none."""
    names: dict[int, str] = {}
    for name, param in params.items():
        names.setdefault(id(param), name)
    return [[names.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]


def _regroup(optimizer: torch.optim.Optimizer, wanted: list[list[str]], params: dict[str, nn.Parameter]) -> None:
    """Make the groups those of the run: a script may have added some while it trained (layers that thaw)."""
    groups = optimizer.param_groups
    if len(groups) > len(wanted):
        raise UsageError(
            f"the {type(optimizer).__name__} here has {len(groups)} groups of parameters, and {len(wanted)} in the run's state: "
            "build it with those it begins with, and add the others in the loop"
        )
    for number, names in enumerate(wanted):
        if number < len(groups) and len(names) == len(groups[number]["params"]) and "" in names:
            continue  # as this script has built it: there is no name to go by
        if "" in names:
            raise UsageError(
                f"group {number} of the {type(optimizer).__name__} was added while the run trained, with a parameter that is in no "
                "prepared model: a worker or a resumed run cannot find it; give its module to run.prepare()"
            )
        found = [params[name] for name in names]
        if number < len(groups):
            groups[number]["params"] = found
        else:
            optimizer.add_param_group({"params": found})


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


def _short(name: str) -> str:
    """As its model knows it."""
    return name.partition(".")[2]


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
