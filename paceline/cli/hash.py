"""paceline hash"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("hash")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Print the weights hash of a state dict in FILE (.safetensors, or saved by torch).

    The same number as `weights_sha256` in a run's summary.json, if the weights are the same.
    """
    from paceline.state.hash import load_state, weights_sha256

    click.echo(weights_sha256(load_state(file)))
