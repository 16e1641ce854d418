"""paceline scale"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.errors import UsageError
from paceline.folder import RunFolder


@click.command("scale")
@click.argument("run")
@click.option("-n", "--workers", type=int, help="Processes that train from now on, up to the run's slots.")
@click.option("--servers", type=int, help="Processes that hold parameters from now on.")
@runs_option
def command(run: str, workers: int | None, servers: int | None, runs: Path) -> None:
    """Give RUN another number of workers or servers, while it trains.

    \b
    paceline scale last -n 6
    paceline scale last --servers 3
    paceline scale last -n 2 --servers 1

    Workers join and leave at the end of a step. Servers that come are given their part of the parameters, and those that
    go end once others hold theirs. The weights stay the same, bit for bit.
    """
    from paceline.cli.asking import ask
    from paceline.watch.terminal import counted
    from paceline.wires.messages import Scale

    if workers is None and servers is None:
        raise UsageError("give -n WORKERS, --servers N, or both: paceline scale last --servers 3")
    folder = RunFolder.find(runs, run)
    ask(folder, Scale(workers, servers))
    given = ((workers, "worker"), (servers, "server"))
    words = " and ".join(counted(count, name) for count, name in given if count is not None)
    click.echo(f"{folder.id} goes to {words}")
