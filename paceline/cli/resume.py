"""`paceline resume`: go on with a run from its newest good checkpoint."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import given as as_typed
from paceline.cli.options import runs_option
from paceline.cluster.job import Job
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.settings import BITS, Settings, Target, merge
from paceline.state.checkpoint import listed, newest_good, step_of
from paceline.strategies import rounds_of


def checkpoint_of(folder: RunFolder) -> str:
    """The name of the checkpoint to go on from; damaged ones are passed over, aloud."""

    def tell(text: str) -> None:
        click.echo(f"paceline: {text}", err=True)
        folder.event("warning", text)

    # A run that is over is taken up again where a step of its last epoch is left: names that its loop sets are there then.
    over = folder.read_json(folder.summary).get("exit") == "finished"
    found = newest_good(folder.checkpoints, tell, inside=over)
    if found is not None:
        return found.name
    if listed(folder.checkpoints):
        raise UsageError(f"none of the checkpoints at {folder.checkpoints} can be read; nothing was changed")
    raise UsageError(f"run {folder.id!r} has no checkpoint: start it with --checkpoint-every N next time")


def refuse_what_trains_nothing(folder: RunFolder, checkpoint: str, settings: Settings, given: dict[str, Any]) -> None:
    """What is left of the script would be written over the run's result."""
    summary, step = folder.read_json(folder.summary), step_of(checkpoint)
    exit, done, asked = summary.get("exit"), summary.get("epochs", 0), given.get("epochs", 0)
    rounds = rounds_of(settings.strategy)
    if exit == "finished" and (rounds or not done or asked <= done):
        raise UsageError(
            f"run {folder.id!r} has finished: there is nothing to go on with, and nothing was changed. {_further(rounds, done)}"
        )
    if rounds and asked:
        raise UsageError(f"--epochs {asked} would change nothing: {_further(rounds, done)}")
    # One that failed behind its loop has done its steps, and not yet what its script does with them.
    if settings.steps and settings.steps <= step and str(exit).startswith("step limit "):
        raise UsageError(
            f"run {folder.id!r} is at step {step}, and --steps {settings.steps} ends it there; pass --steps with more, or "
            "--steps 0 for no limit"
        )
    if settings.target and exit == f"{Target.parse(settings.target).words} reached":
        raise UsageError(
            f"run {folder.id!r} has reached its target; pass another one, or --target '' for none: --target 'accuracy>=0.95'"
        )


def _further(rounds: int, epochs: int) -> str:
    """How a run of so many rounds or epochs would be trained for longer."""
    if rounds:
        return f"rounds={rounds} is part of the run's strategy: start a new run for another number"
    if not epochs:
        return (
            "It has trained no whole epoch, so how far it goes is in its script, in run.steps(n) say, and --epochs adds nothing to "
            "that: start a new run for more"
        )
    return f"To train on, pass --epochs with more than its {epochs}"


class _Resume(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from paceline.cli.run import command as run

            known = {flag: option.name for option in run.params for flag in option.opts}
            if error.option_name not in known:
                raise
            why = ", as other bits would come out" if known[error.option_name] in BITS else ""
            mine = [option.opts[0] for option in self.params if option.name in vars(Settings())]
            raise click.UsageError(
                f"{error.option_name} stays what it was{why}: start a new run for another; what a resume may change is "
                f"{', '.join(mine)}",
                ctx,
            ) from None


@click.command("resume", cls=_Resume)
@click.argument("run")
@click.option("-n", "--workers", type=int, help="Processes that train from now on.  [default: as before]")
@click.option("--servers", type=int, help="Processes that hold parameters and keys from now on.  [default: as before]")
@click.option(
    "--steps", type=int, help="Stop after this many steps of the whole run; 0: no limit.  [default: as before]"
)
@click.option(
    "--epochs",
    type=int,
    help="Train this many epochs in all, in each run.epochs() loop; also a finished run.  [default: as before]",
)
@click.option("--seconds", type=float, help="Stop so many seconds from now; 0: no limit.  [default: as before]")
@click.option("--target", help="Stop when a logged metric gets there; '': no target.  [default: as before]")
@click.option("--show", type=click.Choice(["main", "all", "none"]), default="main", help="Whose output to print.")
@runs_option
def command(run: str, show: str, runs: Path, **given: Any) -> int:
    """Go on with RUN from its newest good checkpoint, with the same script, arguments and settings.

    \b
    paceline resume last
    paceline resume 20261116-0450 -n 2
    paceline resume last --steps 2000

    At any number of workers up to the run's slots, the weights come out as if nothing had happened; replicas that
    train apart (local, postlocal, diloco, streaming, gossip) stay as many as they were. When it ends may be said
    anew, further away or nearer.
    """
    from paceline.cli.run import start
    from paceline.cluster.rendezvous import Rendezvous

    folder = RunFolder.find(runs, run)
    job = Job.read(folder)
    if job is None:
        raise UsageError(f"run {folder.id!r} was not started by `paceline run`: there is nothing to start again")
    Rendezvous.refuse_if_alive(folder)
    checkpoint = checkpoint_of(folder)
    folder = RunFolder(folder.path.absolute())
    # Slots may have followed from the workers that it began with: they stay what they were.
    known = folder.read_json(folder.config).get("settings", {})
    anew = {name: value for name, value in given.items() if value is not None}
    flags = {"slots": known.get("slots", 0)} | job.flags | anew
    settings = merge(flags, {})[0]  # what cannot be is refused before anything is written
    by_script = {name: known[name] for name in ("steps", "target", "strategy") if name in known and name not in flags}
    refuse_what_trains_nothing(folder, checkpoint, dataclasses.replace(settings, **by_script), anew)
    os.chdir(job.directory)
    again = dataclasses.replace(job, flags=flags, faults=[], resume=checkpoint, given=as_typed())
    return start(again, folder, show)
