"""`paceline checkpoints`: list, check and export a run's checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.cluster.memory import words
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.state.checkpoint import Checkpoint, Removed, listed, newest_good


@click.command("checkpoints")
@click.argument("run")
@click.option("--check", is_flag=True, help="Read every one through and compare all checksums.")
@click.option("--export", "target", type=click.Path(path_type=Path), help="Write weights: FILE.safetensors or FILE.pt.")
@click.option("--step", type=int, help="Which one to export.  [default: the newest good one]")
@runs_option
def command(run: str, check: bool, target: Path | None, step: int | None, runs: Path) -> int:
    """List RUN's checkpoints, the oldest first. Exit code 1 if any is damaged.

    \b
    paceline checkpoints last --check
    paceline checkpoints last --export weights.safetensors
    paceline checkpoints last --export weights.pt --step 1200

    The list looks at manifests and sizes; --check reads every byte. An exported file holds the models'
    state dict: torch.load(…, weights_only=True) and safetensors read it, without Paceline.
    """
    folder = RunFolder.find(runs, run)
    found = listed(folder.checkpoints)
    if not found:
        click.echo(f"run {folder.id} has no checkpoint (paceline run --checkpoint-every N writes them)")
        return 0 if target is None else 1
    if target is not None:
        return _export(folder, found, target, step)
    if step is not None:
        raise UsageError("--step says which checkpoint to export: it needs --export FILE")
    damaged = [not _tell_of(checkpoint, check) for checkpoint in found]
    return 1 if any(damaged) else 0


def _tell_of(checkpoint: Checkpoint, check: bool) -> bool:
    """One line about this one; whether it is good, as far as it was looked at."""
    try:
        manifest = checkpoint.check() if check else checkpoint.sized()
    except Removed:
        click.echo(f"step {checkpoint.step:>8}  removed   by its run, meanwhile")
        return True
    except ValueError as error:
        click.echo(f"step {checkpoint.step:>8}  DAMAGED   {error}")
        return False
    state, age = "good" if check else "complete", _age(time.time() - manifest.written)
    click.echo(f"step {checkpoint.step:>8}  {state:8}  {words(manifest.size):>9}  {age:>8}  {checkpoint.address}")
    return True


def _age(seconds: float) -> str:
    """
    >>> _age(42), _age(60 * 90), _age(3 * 86400)
    ('42 s ago', '90 min ago', '72 h ago')
    """
    for unit, length in (("h", 7200 * 2), ("min", 120)):
        if seconds >= length:
            return f"{seconds / (3600 if unit == 'h' else 60):.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _export(folder: RunFolder, found: list[Checkpoint], target: Path, step: int | None) -> int:
    from paceline.state.export import export

    chosen: Checkpoint | None
    if step is None:
        chosen = newest_good(folder.checkpoints, lambda text: click.echo(f"paceline: {text}", err=True))
        if chosen is None:
            raise UsageError(f"none of the checkpoints at {folder.checkpoints} can be read; nothing was written")
    else:
        chosen = next((checkpoint for checkpoint in found if checkpoint.step == step), None)
        if chosen is None:
            there = ", ".join(str(checkpoint.step) for checkpoint in found)
            raise UsageError(f"run {folder.id} has no checkpoint of step {step}; there are: {there}")
    try:
        count = export(chosen, target)
    except ValueError as error:
        raise UsageError(f"{error}; nothing was written") from None
    click.echo(f"{target}: {count} tensors of step {chosen.step}{_not_the_last(folder, chosen.step)}")
    return 0


def _not_the_last(folder: RunFolder, step: int) -> str:
    """A finished run's last weights are what its script has saved: its last checkpoint is older."""
    summary = folder.read_json(folder.summary)
    if "weights_sha256" not in summary or summary["steps"] <= step:
        return ""
    return f"; the run went on to step {summary['steps']}, whose weights only its script could save (run.save)"
