"""paceline hash"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.errors import UsageError

_BEGINNINGS = (b"PK", b"\x80")
"""Of what torch.save writes: a zip file, or a pickle before torch 1.6."""


@click.command("hash")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Print the weights hash of a state dict in FILE (.safetensors, or saved by torch).

    The same number as `weights_sha256` in a run's summary.json, if the weights are the same.
    """
    _check_kind(file)
    from paceline.state.hash import load_state, weights_sha256

    click.echo(weights_sha256(load_state(file)))


def _check_kind(file: Path) -> None:
    """Before torch is asked, whose advice is for files that are its own."""
    if not file.is_file() or file.suffix == ".safetensors":
        return
    with open(file, "rb") as opened:
        beginning = opened.read(2)
    if not beginning.startswith(_BEGINNINGS):
        raise UsageError(f"{file} is not a torch or safetensors file")
