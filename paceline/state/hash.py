"""The weights hash: sha256 over names (sorted), dtypes, shapes and raw bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.errors import UsageError


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


def load_state(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a .safetensors file or a torch file, without running any code from it."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return dict(load_file(str(path)))
        except Exception as error:  # noqa: BLE001  as below
            raise UsageError(f"{path} is not a safetensors file: {error}") from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises many kinds for a file that is not plain
        raise UsageError(
            f"{path} is not a file of plain tensors: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from None
    for _ in range(4):
        if not isinstance(loaded, dict):
            break
        inner = next((loaded[k] for k in ("state_dict", "model", "weights") if isinstance(loaded.get(k), dict)), None)
        if inner is None:
            break
        loaded = inner
    tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)} if isinstance(loaded, dict) else {}
    if not tensors:
        raise UsageError(f"{path} holds no state dict")
    return tensors
