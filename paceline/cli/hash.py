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

    The same number as `weights_sha256` in a run's summary.json, if the weights are the same. Of a file with more in it
    than one state dict, it says on stderr what the hash leaves out.
    """
    _check_kind(file)
    from paceline.state.hash import find_state, weights_sha256

    found = find_state(file)
    click.echo(weights_sha256(found.tensors))
    if found.left_out:
        hashed = repr(found.key) if found.key else "the tensors at the top"
        others = ", ".join(map(repr, found.left_out))
        click.echo(f"paceline: this is the hash of {hashed} in {file}; left out: {others}", err=True)


def _check_kind(file: Path) -> None:
    """Before torch is asked, whose advice is for files that are its own."""
    if not file.is_file() or file.suffix == ".safetensors":
        return
    with open(file, "rb") as opened:
        beginning = opened.read(2)
    if not beginning.startswith(_BEGINNINGS):
        raise UsageError(f"{file} is not a torch or safetensors file")
