"""paceline stop"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.folder import RunFolder


@click.command("stop")
@click.argument("run")
@click.option("--kill", is_flag=True, help="End all processes at once, without a checkpoint.")
@runs_option
def command(run: str, kill: bool, runs: Path) -> None:
    """Stop RUN after the step in hand; with --checkpoint-every it writes a checkpoint first.

    \b
    paceline stop last
    paceline resume last      goes on later
    """
    from paceline.cli.asking import ask
    from paceline.wires.board import Stop as Asked
    from paceline.wires.messages import Stop

    folder = RunFolder.find(runs, run)
    ask(folder, Stop(Asked.COMMAND, kill))
    click.echo(f"{folder.id} {'was killed' if kill else 'stops after this step'}")
