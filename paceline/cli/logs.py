"""paceline logs"""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.errors import UsageError
from paceline.watch.folder import RunFolder
from paceline.watch.lines import Follower


@click.command("logs")
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Go on as the files grow; ends with the run.")
@click.option("--worker", type=int, help="Only this worker's.")
@click.argument("run")
def command(run: str, runs: Path, follow: bool, worker: int | None) -> None:
    """Print a run's log files, each line behind its worker's number.

    RUN is a run's id, the beginning of one, or 'last'.
    """
    folder = RunFolder.find(runs, run)
    paths = sorted(folder.logs.glob("*.log"))
    if worker is not None:
        paths = [path for path in paths if path.stem == f"worker-{worker}"]
        if not paths:
            raise UsageError(f"run {folder.id} has no worker {worker}")
    followers = [(path.stem, Follower(path)) for path in paths]
    while True:
        over = not follow or folder.summary.exists()
        for name, follower in followers:
            for line in follower.read(last=over):
                prefix = "" if len(followers) == 1 else f"{name} │ "
                click.echo(prefix + line.rstrip("\r\n"))
        if over:
            return
        time.sleep(0.2)
