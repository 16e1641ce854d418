"""paceline scale"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.watch.folder import RunFolder


@click.command("scale")
@click.argument("run")
@click.option("-n", "--workers", type=int, required=True, help="Processes that train from now on.")
@runs_option
def command(run: str, workers: int, runs: Path) -> None:
    """Train RUN with another number of workers from now on, while it trains. Up to its slots.

    \b
    paceline scale last -n 6

    Newcomers join and leavers go at the end of a step; the weights stay the same, bit for bit.
    """
    from paceline.cli.asking import ask
    from paceline.cluster.messages import Scale

    folder = RunFolder.find(runs, run)
    ask(folder, Scale(workers))
    click.echo(f"{folder.id} goes to {workers} worker{'s' * (workers != 1)}")
