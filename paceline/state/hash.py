"""The weights hash: sha256 over names (sorted), dtypes, shapes and raw bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.errors import UsageError

_KEYS = ("state_dict", "model", "weights")
"""Where a checkpoint has its state dict."""


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Equal exactly when every tensor has the same name, dtype, shape and bits.

    >>> weights_sha256({"w": torch.zeros(2)})[:12]
    '8aefad56d866'
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Found(NamedTuple):
    tensors: dict[str, torch.Tensor]
    key: str = ""
    """Where they were in the file, if not at its top."""
    left_out: tuple[str, ...] = ()
    """What else with tensors in it was there. Numbers and words are not named."""


def load_state(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a .safetensors file or a torch file, without running any code from it."""
    return find_state(path).tensors


def find_state(path: Path) -> Found:
    """The same, and where they were."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return Found(dict(load_file(str(path))))
        except Exception as error:  # noqa: BLE001  as below
            raise UsageError(f"{path} is not a safetensors file: {error}") from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises many kinds for a file that is not plain
        raise UsageError(
            f"{path} is not a file of plain tensors: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from None
    keys: list[str] = []
    left_out: list[str] = []
    for _ in range(4):
        if not isinstance(loaded, dict):
            break
        key = next((k for k in _KEYS if isinstance(loaded.get(k), dict)), None)
        left_out += [".".join([*keys, str(k)]) for k, v in loaded.items() if k != key and _may_be_meant(v, key)]
        if key is None:
            break
        keys, loaded = [*keys, key], loaded[key]
    tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)} if isinstance(loaded, dict) else {}
    if not tensors:
        raise UsageError(f"{path} holds no state dict")
    return Found(tensors, ".".join(keys), tuple(left_out))


def _may_be_meant(value: Any, key: str | None) -> bool:
    """Whether this, which is no part of the hash, holds tensors too."""
    if isinstance(value, dict):
        return _has_tensors(value)
    return key is not None and isinstance(value, torch.Tensor)


def _has_tensors(value: dict[Any, Any], depth: int = 4) -> bool:
    """An optimizer has its own three dicts down; a file may contain itself."""
    return any(
        isinstance(v, torch.Tensor) or (isinstance(v, dict) and depth > 0 and _has_tensors(v, depth - 1))
        for v in value.values()
    )
