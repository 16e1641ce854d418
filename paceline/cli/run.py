"""paceline run"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import given as as_typed
from paceline.cli.options import runs_option
from paceline.cli.resume import checkpoint_of
from paceline.cluster.job import Job
from paceline.errors import UsageError
from paceline.faults.plan import Fault
from paceline.folder import RunFolder
from paceline.launch.environment import visible_gpus
from paceline.settings import DEVICES, ON_DEATH, PRECISIONS, TRANSPORTS, Settings, merge
from paceline.state.checkpoint import listed

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
@click.option("--spares", type=int, help="Processes that wait, ready to replace a lost one.  [default: 0]")
@click.option(
    "--servers",
    type=int,
    help="Processes that hold parameters, and the keys of run.kv.  [default: 1 where the strategy has any]",
)
@click.option("--replicas", type=int, help="Copies of what servers hold, on different servers.  [default: 2]")
@click.option("--machines", type=int, help="Machines to begin with; the others join by `paceline agent`.  [default: 1]")
@click.option("--listen", help="HOST or HOST:PORT at which other machines reach this one.")
@click.option("--store", help="etcd://HOST:PORT,… : then the run outlives this machine too.")
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
@click.option("--checkpoint-every", type=int, help="Write a checkpoint every so many steps; see `paceline resume`.")
@click.option("--checkpoints", help="Where they go: a folder or any fsspec address.  [default: the run folder]")
@click.option("--keep", type=int, help="How many checkpoints to keep.  [default: 3]")
@click.option(
    "--step-timeout", type=float, help="End and replace a worker for which others wait longer than so many seconds."
)
@click.option("--lease", type=float, help="Seconds a frozen process may stay in the run.  [default: 3]")
@click.option("--grace", type=float, help="Seconds workers train on without a coordinator.  [default: 60]")
@click.option(
    "--on-death",
    type=click.Choice(ON_DEATH),
    help="Of a replica that trains apart: do again what it has trained, or go on without it.  [default: replay]",
)
@click.option("--drop-after", type=float, help="Seconds a lost replica is waited for before that.  [default: 5]")
@click.option("--min-workers", type=int, help="Replicas without which the run waits instead.  [default: 2]")
@click.option(
    "--state-copies/--no-state-copies",
    default=None,
    help="Copy each replica's state to another machine, so that its own may be lost.  [default: yes, with several]",
)
@click.option("--resume", type=click.Choice(["auto"]), help="auto: if --name has a checkpoint, go on from it.")
@click.option("--steps", type=int, help="Stop after this many steps.")
@click.option("--epochs", type=int, help="Train this many epochs instead of the script's number.")
@click.option("--seconds", type=float, help="Stop after this many seconds.")
@click.option("--target", help="Stop when a logged metric gets there: 'accuracy>=0.9'.")
@click.option("--name", help="The run's name.  [default: date and time]")
@runs_option
@click.option("--show", type=click.Choice(["main", "all", "none"]), default="main", help="Whose output to print.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    help="Let something go wrong: 'kill worker:2 @step 120', 'kill server:1 @time 20s'.",
)
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
    faults: tuple[str, ...],
    resume: str | None,
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
    flags = {name: value for name, value in given.items() if value is not None}
    _check_order(arguments, flags)
    if not as_module:
        _check_script(script)
    gpus = _gpus_for(merge(flags, {})[0])
    job = Job(script, list(arguments), as_module, flags, os.getcwd(), gpus, dry_run, list(faults), given=as_typed())
    _check_spares(job)
    _check_faults(job)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="paceline-dry-") as nowhere:
            return start(job, RunFolder.create(Path(nowhere), name), show)
    folder, checkpoint = _folder(runs, name, resume)
    code = start(dataclasses.replace(job, resume=checkpoint), folder, show)
    if code == 2 and "sys.exit(2)" in folder.read_json(folder.summary).get("exit", ""):
        _tell_strays(arguments, flags)
    return code


def start(job: Job, folder: RunFolder, show: str) -> int:
    """Start a job in its folder, and show it to its end; the exit code."""
    from paceline.cluster.agent import start_agent
    from paceline.cluster.rendezvous import Rendezvous
    from paceline.watch.terminal import Terminal
    from paceline.watch.viewer import Viewer

    folder = RunFolder(folder.path.absolute())
    job.write(folder)
    folder.summary.unlink(missing_ok=True)
    place = Rendezvous.create(folder, gpus=tuple(job.gpus), reach=_reach(job, folder))
    viewer = Viewer(folder, place, Terminal(job.workers), show)
    agent = start_agent(folder, machine=0, first=True)
    code = viewer.watch()
    agent.poll()  # it has ended, unless the run goes on without this terminal
    return code


def _reach(job: Job, folder: RunFolder) -> Any:
    """How other machines find this one, if there are any."""
    from paceline.cluster.rendezvous import ONE_MACHINE, Reach
    from paceline.cluster.store import create_store

    settings = job.settings
    if not settings.listen or job.dry_run:
        return ONE_MACHINE
    host, _, port = settings.listen.rpartition(":") if settings.listen.count(":") == 1 else (settings.listen, "", "0")
    run = ""
    if settings.store:
        store = create_store(settings.store, folder.id)
        run = store.run
        store.close()
    return Reach(secrets.token_hex(8), host, int(port), "", run)


def _folder(runs: Path, name: str | None, resume: str | None) -> tuple[RunFolder, str]:
    """The run's folder, and the checkpoint to go on from, if there is one and it is asked for."""
    from paceline.cluster.rendezvous import Rendezvous

    if resume is None:
        return RunFolder.create(runs, name), ""
    if name is None:
        raise UsageError("--resume auto needs --name: which run to go on with")
    known = RunFolder(runs / name)
    if not known.path.exists():
        return RunFolder.create(runs, name), ""
    Rendezvous.refuse_if_alive(known)
    return known, checkpoint_of(known) if listed(known.checkpoints) else ""


def _check_order(arguments: tuple[str, ...], flags: dict[str, Any]) -> None:
    stray = _stray(arguments, flags, ("workers",))
    if stray:
        raise UsageError(
            f"{stray} stands after the script, so it would go to the script; paceline's own flags come before it: "
            f"paceline run {stray} SCRIPT …  (if your script has a {_flag(stray)} of its own, give paceline's too)"
        )


def _tell_strays(arguments: tuple[str, ...], flags: dict[str, Any]) -> None:
    """The script refused its arguments: perhaps one was meant for paceline."""
    stray = _stray(arguments, flags, tuple(name for name in vars(Settings()) if name != "workers"))
    if stray:
        click.echo(
            f"paceline: {stray} stands after the script, so it went to the script; paceline's own flags come before it: "
            f"paceline run {stray} SCRIPT …  (unless your script has a {_flag(stray)} of its own)",
            err=True,
        )


def _stray(arguments: tuple[str, ...], flags: dict[str, Any], settings: tuple[str, ...]) -> str:
    """The first flag of one of these settings among the script's arguments, with its value; or nothing."""
    mine = {flag: option for option in command.params if option.name in settings for flag in option.opts}
    for at, argument in enumerate(arguments):
        option = mine.get(_flag(argument))
        if option is not None and option.name not in flags:
            alone = "=" in argument or getattr(option, "is_flag", False)
            return " ".join(arguments[at : at + (1 if alone else 2)])
    return ""


def _flag(argument: str) -> str:
    """--slots of '--slots=4' and of '--slots 4'"""
    return re.split("[= ]", argument)[0]


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
    wanted = -(-(settings.workers + settings.spares) // settings.machines)
    if gpus and wanted > len(gpus) and not settings.share_gpus:
        spares = f" and {settings.spares} spare(s)" if settings.spares else ""
        fewer = "fewer of them" if settings.spares else f"-n {len(gpus)}"
        raise UsageError(
            f"{settings.workers} workers{spares} for {len(gpus)} GPU(s): each takes one. Pass {fewer}, --device cpu, "
            "or --share-gpus to let several workers use one"
        )
    return gpus


def _check_faults(job: Job) -> None:
    for text in job.faults:
        fault = Fault.parse(text)
        if fault.role == "server" and not job.settings.servers:
            raise UsageError(f"--fault {text!r}: this run has no servers; pass --strategy ps --servers 2")


def _check_spares(job: Job) -> None:
    if job.spares and job.workers == 1:
        raise UsageError(
            "--spares with one worker: if it dies, nobody has the run's state to give to a spare; pass -n 2"
        )
