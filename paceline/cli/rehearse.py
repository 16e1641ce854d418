"""`paceline rehearse`: let things go wrong at random, and see whether the run comes out the same."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.cli import cli
from paceline.cli.options import runs_option
from paceline.cli.run import command as run_command
from paceline.errors import PacelineError, UsageError
from paceline.faults.judge import HEAD, Outcome, Verdict, row, total
from paceline.faults.plan import HITS, KINDS, ROLES, Fault, Kind, Role
from paceline.faults.random import Range, random_plan
from paceline.faults.rehearsal import Rehearsal, plan_flags
from paceline.folder import RunFolder, new_id
from paceline.watch.lines import aligned

_OF_RUN = (
    *(
        "servers",
        "replicas",
        "as_module",
        "slots",
        "threads",
        "seed",
        "strategy",
        "precision",
        "device",
        "share_gpus",
        "transport",
    ),
    *("split", "steps", "epochs"),
)
"""Options of `paceline run` that are handed on as they are."""
_TICK_S = 0.2


class _Words(click.ParamType):  # type: ignore[type-arg]
    """Some of these words, with commas."""

    name = "words"

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        words = value if isinstance(value, tuple) else tuple(word.strip() for word in value.split(","))
        for word in words:
            if word not in self._known:
                self.fail(f"{word!r} is none of {', '.join(self._known)}", param, ctx)
        return words


@dataclass(frozen=True)
class _Draw:
    """Which plans are drawn."""

    seeds: int
    first_seed: int
    kinds: tuple[Kind, ...]
    roles: tuple[Role, ...]
    most: int

    def __post_init__(self) -> None:
        if not any(role in HITS[kind] for kind in self.kinds for role in self.roles):
            raise UsageError(
                f"--kinds {','.join(self.kinds)} can hit none of --roles {','.join(self.roles)}; see docs/faults.md"
            )

    def plans(self, within: Range) -> dict[int, list[Fault]]:
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        plans = {seed: random_plan(seed, within, self.kinds, self.roles, self.most) for seed in seeds}
        if not any(plans.values()):  # only servers were asked for
            raise UsageError(
                f"--roles {','.join(self.roles)}: a run with --servers {within.servers} --replicas {within.replicas} "
                "bears no server's death; pass --strategy ps --servers 2 --replicas 2, or more of them"
            )
        return plans


@click.command(
    "rehearse",
    context_settings={"allow_interspersed_args": False},
    epilog="Paceline's own flags end at the script: what follows it belongs to the script.",
)
@click.option("--seeds", type=click.IntRange(1), default=50, show_default=True, help="How many plans.")
@click.option("--first-seed", type=click.IntRange(0), default=1, show_default=True, help="The first plan's seed.")
@click.option("-n", "--workers", type=click.IntRange(2), default=4, show_default=True, help="Processes that train.")
@click.option("--kinds", type=_Words(KINDS), default=KINDS, help=f"What may happen.  [default: {','.join(KINDS)}]")
@click.option("--roles", type=_Words(ROLES), default=ROLES, help=f"To whom.  [default: {','.join(ROLES)}]")
@click.option("--most", type=click.IntRange(1), default=4, show_default=True, help="Most faults of a plan.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at a time.")
@runs_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(script: str, arguments: tuple[str, ...], workers: int, jobs: int, runs: Path, **given: Any) -> int:
    """Train SCRIPT once as it is, then once for each seed with a random fault plan, and compare.

    \b
    paceline rehearse train.py
    paceline rehearse --strategy ps --servers 2 train.py
    paceline rehearse --seeds 10 --kinds kill,freeze -n 3 --steps 200 train.py --lr 0.1

    Every run must end with the weights, samples and steps of the first and leave no process behind.
    Ends with 1 if one does not, with the line to run it again.
    """
    draw = _Draw(**{each.name: given.pop(each.name) for each in fields(_Draw)})
    flags = ["-n", str(workers), *_handed_on(given)]
    folder = runs / f"rehearse-{new_id()}"
    folder.mkdir(parents=True)
    verifies = "verify" in cli.list_commands(click.get_current_context())
    rehearsal = Rehearsal(folder, flags, [script, *arguments], verifies)
    with _ended_by_sigterm():
        reference = _reference(rehearsal)
        plans = draw.plans(_range(rehearsal, reference, workers))
        verdicts: list[Verdict] = []
        try:
            _rehearse_all(rehearsal, reference, plans, jobs, verdicts)
        finally:
            verdicts.sort(key=lambda verdict: verdict.seed)
            _report(rehearsal, reference, verdicts)
    return 1 if any(verdict.violations for verdict in verdicts) else 0


command.params[3:3] = [parameter for parameter in run_command.params if parameter.name in _OF_RUN]


def _handed_on(given: dict[str, Any]) -> Iterator[str]:
    """The options of `paceline run`, as they were typed."""
    for option in command.params:
        value = given.get(option.name or "")
        if option.name in _OF_RUN and value is not None and value is not False:
            yield option.opts[0]
            if value is not True:
                yield str(value)


def _reference(rehearsal: Rehearsal) -> Outcome:
    """The clean run; without one there is nothing to compare with."""
    click.echo(f"paceline: a run without faults first, in {rehearsal.folder / 'reference'}", err=True)
    outcome = rehearsal.reference()
    if outcome.code or "weights_sha256" not in outcome.summary:
        click.echo(rehearsal.output("reference").read_text(errors="replace"), err=True, nl=False)
        raise PacelineError("the run without faults failed (see above): nothing was rehearsed")
    if rehearsal.verifies and (why := rehearsal.unproven()):
        click.echo(
            f"paceline: not proven, with or without faults: {why}. Each plan must have trained the same samples",
            err=True,
        )
    return outcome


def _range(rehearsal: Rehearsal, reference: Outcome, workers: int) -> Range:
    run = RunFolder(rehearsal.folder / "reference")
    settings = run.read_json(run.config).get("settings", {})
    servers, replicas = (int(settings.get(name, 0)) for name in ("servers", "replicas"))
    return Range(reference.summary["steps"], reference.seconds, workers, servers, replicas)


def _rehearse_all(
    rehearsal: Rehearsal, reference: Outcome, plans: dict[int, list[Fault]], jobs: int, verdicts: list[Verdict]
) -> None:
    """One thread a job, which only waits. A verdict is told when it is there."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ThreadPoolExecutor(jobs) as threads,
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("rehearsing", total=len(plans))
        try:
            waiting: set[Future[Verdict]] = {
                threads.submit(rehearsal.rehearse, seed, faults, reference) for seed, faults in plans.items()
            }
            while waiting:
                done, waiting = wait(waiting, _TICK_S, FIRST_COMPLETED)
                for verdict in (future.result() for future in done):
                    verdicts.append(verdict)
                    progress.advance(task)
                    if verdict.violations or not console.is_terminal:
                        _tell(console, verdict)
        except BaseException:
            rehearsal.stop.set()
            threads.shutdown(cancel_futures=True)
            raise


def _tell(console: Console, verdict: Verdict) -> None:
    how = "VIOLATION: " if verdict.violations else ""
    plan = ", ".join(map(str, verdict.faults))
    console.print(f"seed {verdict.seed}: {how}{verdict.why} ({verdict.seconds:.0f} s): {plan}", markup=False)


def _report(rehearsal: Rehearsal, reference: Outcome, verdicts: Sequence[Verdict]) -> None:
    """The table, the lines to run again what went wrong, and all of it as a file."""
    for line in aligned([HEAD, *map(row, verdicts)]):
        click.echo(line)
    for verdict in verdicts:
        if verdict.violations:
            flags = [*rehearsal.flags, *plan_flags(verdict.faults, reference)]
            click.echo(f"\nseed {verdict.seed}, in {rehearsal.folder / f'seed-{verdict.seed}'}; again with")
            click.echo(f"  {shlex.join(['paceline', 'run', *flags, *rehearsal.target])}")
    click.echo(f"\n{total(verdicts)}")
    folder = RunFolder(rehearsal.folder)
    plain = [{**asdict(verdict), "faults": list(map(str, verdict.faults))} for verdict in verdicts]
    folder.write_json(rehearsal.folder / "rehearsal.json", {"verdicts": plain})


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a rehearsal as Ctrl-C does: nothing it has started stays."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
