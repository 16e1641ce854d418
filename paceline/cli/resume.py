"""`paceline resume`: go on with a run from its newest good checkpoint."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.cluster.job import Job
from paceline.errors import UsageError
from paceline.settings import merge
from paceline.state.checkpoint import listed, newest_good
from paceline.watch.folder import RunFolder


def checkpoint_of(folder: RunFolder) -> str:
    """The name of the checkpoint to go on from; damaged ones are passed over, aloud."""

    def tell(text: str) -> None:
        click.echo(f"paceline: {text}", err=True)
        folder.event("warning", text)

    found = newest_good(folder.checkpoints, tell)
    if found is not None:
        return found.name
    if listed(folder.checkpoints):
        raise UsageError(f"none of the checkpoints at {folder.checkpoints} can be read; nothing was changed")
    raise UsageError(f"run {folder.id!r} has no checkpoint: start it with --checkpoint-every N next time")


def refuse_if_finished(folder: RunFolder) -> None:
    """It would train nothing, and what is left of its script would be written over its result."""
    if folder.read_json(folder.summary).get("exit") == "finished":
        raise UsageError(f"run {folder.id!r} has finished: there is nothing to go on with, and nothing was changed")


@click.command("resume")
@click.argument("run")
@click.option("-n", "--workers", type=int, help="Processes that train from now on.  [default: as before]")
@click.option("--servers", type=int, help="Processes that hold parameters and keys from now on.  [default: as before]")
@click.option("--show", type=click.Choice(["main", "all", "none"]), default="main", help="Whose output to print.")
@runs_option
def command(run: str, workers: int | None, servers: int | None, show: str, runs: Path) -> int:
    """Go on with RUN from its newest good checkpoint, with the same script, arguments and settings.

    \b
    paceline resume last
    paceline resume 20261116-0450 -n 2

    At any number of workers up to the run's slots, the weights come out as if nothing had happened.
    """
    from paceline.cli.run import start
    from paceline.cluster.rendezvous import Rendezvous

    folder = RunFolder.find(runs, run)
    job = Job.read(folder)
    if job is None:
        raise UsageError(f"run {folder.id!r} was not started by `paceline run`: there is nothing to start again")
    Rendezvous.refuse_if_alive(folder)
    checkpoint = checkpoint_of(folder)
    refuse_if_finished(folder)
    folder = RunFolder(folder.path.absolute())
    # Slots may have followed from the workers that it began with: they stay what they were.
    slots = folder.read_json(folder.config).get("settings", {}).get("slots", 0)
    given = {"workers": workers, "servers": servers}
    flags = {"slots": slots} | job.flags | {name: value for name, value in given.items() if value is not None}
    merge(flags, {})  # what cannot be is refused before anything is written
    os.chdir(job.directory)
    return start(dataclasses.replace(job, flags=flags, faults=[], resume=checkpoint), folder, show)
