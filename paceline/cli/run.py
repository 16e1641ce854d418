"""paceline run"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import runs_option
from paceline.errors import UsageError
from paceline.launch.environment import visible_gpus
from paceline.settings import DEVICES, PRECISIONS, TRANSPORTS, Settings, merge
from paceline.watch.folder import RunFolder

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(\d+)\s*([KMG]?)i?B?", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no size; write 512M or 4G", param, ctx)
        return int(match[1]) * _SIZES[match[2].upper()]


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Paceline's own flags end at the script: what follows it belongs to the script.",
)
@click.option("-n", "--workers", type=int, help="Processes that train.  [default: 1]")
@click.option("-m", "as_module", is_flag=True, help="The target is a module: -m pkg.train")
@click.option("--slots", type=int, help="Logical workers, fixed for the run; any -n up to it gives the same bits.")
@click.option("--threads", type=int, help="Threads of each worker; part of the run's bits.  [default: 1]")
@click.option("--seed", type=int, help="Seed of everything random.  [default: 0]")
@click.option("--strategy", help="How workers keep in step.  [default: allreduce]")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of the models' forward passes.  [default: fp32]")
@click.option("--device", type=click.Choice(DEVICES), help="[default: auto]")
@click.option("--share-gpus", is_flag=True, default=None, help="Let several workers use one GPU.")
@click.option("--transport", type=click.Choice(TRANSPORTS), help="How tensors move between workers.  [default: auto]")
@click.option("--shm-limit", type=_Size(), help="Most shared memory the run may take, such as 4G.")
@click.option("--split", help="How data is cut: even, rows, or one weight a slot (1,1,2,4).  [default: even]")
@click.option("--steps", type=int, help="Stop after this many steps.")
@click.option("--epochs", type=int, help="Train this many epochs instead of the script's number.")
@click.option("--seconds", type=float, help="Stop after this many seconds.")
@click.option("--target", help="Stop when a logged metric gets there: 'accuracy>=0.9'.")
@click.option("--name", help="The run's name.  [default: date and time]")
@runs_option
@click.option("--show", type=click.Choice(["main", "all", "none"]), default="main", help="Whose output to print.")
@click.option("--dry-run", is_flag=True, help="Resolve the settings, print them with their origins, train nothing.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str,
    arguments: tuple[str, ...],
    as_module: bool,
    runs: Path,
    name: str | None,
    show: str,
    dry_run: bool,
    **given: Any,
) -> int:
    """Train SCRIPT with N workers.

    \b
    paceline run -n 4 train.py --lr 0.1
    paceline run -n 3 --slots 12 -m pkg.train
    paceline run -n 4 --steps 100 --precision bf16 train.py

    The script calls paceline.init(), hands its model, optimizer and loader to run.prepare(), and loops
    over run.epochs() and run.slots(). The weights that come out are the same, bit for bit, for every
    -n up to --slots.
    """
    from paceline.cluster.agent import Agent, Job
    from paceline.watch.terminal import Terminal

    flags = {name: value for name, value in given.items() if value is not None}
    _check_order(arguments, flags)
    if not as_module:
        _check_script(script)
    settings, _ = _flag_settings(flags)
    gpus = _gpus_for(settings)
    job = Job(script, arguments, as_module, flags, settings, show, dry_run, tuple(gpus))
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="paceline-dry-") as nowhere:
            return Agent(job, RunFolder.create(Path(nowhere), name), Terminal(1)).run()
    return Agent(job, RunFolder.create(runs, name), Terminal(settings.workers)).run()


def _flag_settings(flags: dict[str, Any]) -> tuple[Settings, dict[str, str]]:
    """What the flags alone say. The script's init() may still set what no flag did."""
    return merge(flags, {})


def _check_order(arguments: tuple[str, ...], flags: dict[str, Any]) -> None:
    for flag in ("-n", "--workers"):
        if flag in arguments and "workers" not in flags:
            at = arguments.index(flag)
            raise UsageError(
                f"{' '.join(arguments[at : at + 2])} stands after the script, so it would go to the script; paceline's own "
                f"flags come before it: paceline run {' '.join(arguments[at : at + 2])} SCRIPT …  (if your script has a "
                f"{flag} of its own, give paceline's too)"
            )


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.is_file():
        hint = " (a module? use -m)" if re.fullmatch(r"[\w.]+", script) and not script.endswith(".py") else ""
        raise UsageError(f"no such script: {script}, looked in {os.getcwd()}{hint}")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        import traceback

        sys.stderr.write("".join(traceback.format_exception_only(error)))
        raise UsageError(f"{script} does not compile: nothing was started") from None


def _gpus_for(settings: Settings) -> list[str]:
    if settings.device == "cpu":
        return []
    gpus = visible_gpus()
    if settings.device == "cuda" and not gpus:
        raise UsageError("--device cuda, but this machine shows no GPU: pass --device cpu")
    if gpus and settings.workers > len(gpus) and not settings.share_gpus:
        raise UsageError(
            f"{settings.workers} workers for {len(gpus)} GPU(s): each worker takes one. Pass -n {len(gpus)}, --device cpu, "
            "or --share-gpus to let several workers use one"
        )
    return gpus
