"""A checkpoint's weights as a file that any PyTorch user can load."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from paceline.errors import UsageError
from paceline.folder import write_atomically
from paceline.state.checkpoint import Checkpoint
from paceline.tensors.snapshot import Snapshot

KINDS = (".safetensors", ".pt", ".pth")


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The models' state dict; with several models a name starts with its model's number."""
    replica = Snapshot.read(checkpoint.read()).tree["replica"]
    return {name: replica["tensors"][number] for name, number in replica["names"].items()}


def export(checkpoint: Checkpoint, path: Path) -> int:
    """Write the weights, in the format of the path's ending; how many tensors there are."""
    state = weights(checkpoint)
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        # Tied weights: this format has no two names for one tensor.
        raw = save({name: tensor.clone() for name, tensor in state.items()}, metadata={"format": "pt"})
    elif path.suffix in KINDS:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        raw = buffer.getvalue()
    else:
        raise UsageError(f"--export {path}: the name must end in one of {', '.join(KINDS)}")
    try:
        write_atomically(path, raw)
    except OSError as error:
        raise UsageError(f"--export {path}: {error.strerror}") from None
    return len(state)
