"""`paceline checkpoints`: list and check a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.cluster.memory import words
from paceline.state.checkpoint import listed
from paceline.watch.folder import RunFolder


@click.command("checkpoints")
@click.argument("run")
@runs_option
def command(run: str, runs: Path) -> int:
    """List RUN's checkpoints, the oldest first, and read each one through. Exit code 1 if any is damaged."""
    folder = RunFolder.find(runs, run)
    found = listed(folder.checkpoints)
    if not found:
        click.echo(f"run {folder.id} has no checkpoint (paceline run --checkpoint-every N writes them)")
    damaged = 0
    for checkpoint in found:
        try:
            size = len(checkpoint.read())
        except ValueError as error:
            damaged += 1
            click.echo(f"step {checkpoint.step:>8}  DAMAGED  {error}")
        else:
            click.echo(f"step {checkpoint.step:>8}  good  {words(size):>9}  {checkpoint.path}")
    return 1 if damaged else 0
