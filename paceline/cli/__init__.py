"""The command line: one file per verb. Verbs are imported when used, so that --help is quick."""

from __future__ import annotations

import importlib
import shlex
import sys
from typing import NoReturn

import click

from paceline import __version__
from paceline.cli.options import GIVEN
from paceline.errors import PacelineError

_VERBS = {
    "run": "Train a script with N workers.",
    "agent": "Take part in a run from a further machine.",
    "resume": "Go on with a run from its newest checkpoint.",
    "attach": "Get the view of a run under way back.",
    "stop": "Stop a run after its step.",
    "scale": "Change a run's number of workers or servers while it trains.",
    "rehearse": "Train a script under random faults, and compare.",
    "runs": "List the runs.",
    "show": "Show one run: settings, result, events.",
    "logs": "Print a run's log files.",
    "checkpoints": "List, check and export a run's checkpoints.",
    "verify": "Prove from its receipts which samples a run trained.",
    "hash": "Print the weights hash of a file.",
    "strategies": "List the strategies and codecs, and what they cost.",
    "doctor": "Check this machine.",
}


class _Verbs(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _run_flags():
                raise
            _needs_run(ctx, given, f"{error.option_name} is a flag of 'paceline run'")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _VERBS and args[0].endswith(".py"):
            _needs_run(ctx, args, f"{args[0]} is no verb")
        ctx.meta[GIVEN] = list(args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"paceline.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


def _run_flags() -> list[str]:
    from paceline.cli.run import command

    return [flag for parameter in command.params for flag in parameter.opts]


def _needs_run(ctx: click.Context, given: list[str], why: str) -> NoReturn:
    raise click.UsageError(f"{why}; use: paceline run {shlex.join(given)}", ctx)


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version")
def cli() -> None:
    """Train one PyTorch script on one process or many, with the same bits.

    \b
    python train.py                       a run of one
    paceline run -n 4 train.py --lr 0.1   four workers; what follows the script is the script's
    paceline show last                    what came of it
    """


def main() -> None:
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)
    except PacelineError as error:
        sys.stderr.write(f"paceline: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
