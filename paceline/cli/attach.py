"""paceline attach"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.folder import RunFolder


@click.command("attach")
@click.argument("run")
@click.option("--show", type=click.Choice(["main", "all", "none"]), default="main", help="Whose output to print.")
@runs_option
def command(run: str, show: str, runs: Path) -> int:
    """Get the view of a RUN under way back: its output from now on, progress, the final table.

    Ctrl-C stops the run, as in the terminal that started it; to leave it alone, close the terminal.
    """
    from paceline.cluster.job import Job
    from paceline.cluster.rendezvous import Rendezvous
    from paceline.watch.terminal import Terminal
    from paceline.watch.viewer import Viewer

    folder = RunFolder.find(runs, run)
    job = Job.read(folder)
    workers = job.workers if job else 1
    return Viewer(folder, Rendezvous.here(folder), Terminal(workers), show).watch()
