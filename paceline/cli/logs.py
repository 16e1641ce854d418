"""paceline logs"""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.watch.lines import Follower


@click.command("logs")
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Go on as the files grow; ends with the run.")
@click.option("--worker", type=int, help="Only this worker's.")
@click.option("--server", type=int, help="Only this server's.")
@click.argument("run")
def command(run: str, runs: Path, follow: bool, worker: int | None, server: int | None) -> None:
    """Print a run's log files, each line behind the name of its process, such as worker-0.

    RUN is a run's id, the beginning of one, or 'last'.
    """
    folder = RunFolder.find(runs, run)
    paths = sorted(folder.logs.glob("*.log"))
    asked = [(role, number) for role, number in (("worker", worker), ("server", server)) if number is not None]
    if asked:
        paths = [folder.log_of(*each) for each in asked]
        for path, (role, number) in zip(paths, asked, strict=True):
            if not path.exists():
                raise UsageError(f"run {folder.id} has no {role} {number}")
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
