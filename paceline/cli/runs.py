"""paceline runs"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.folder import RunFolder
from paceline.watch.lines import aligned, shortened

_COLUMNS = ("run", "started", "exit", "steps", "workers", "slots", "samples/s", "weights")
_SPARE = ("started", "weights", "samples/s", "slots", "workers", "steps")
"""What goes first where the width is short; the time is in most ids already."""
_EXIT_AT_LEAST, _EXIT_AT_MOST = 20, 60
"""The second where the width is not known: a long message would push all that follows out of sight."""


@click.command("runs")
@runs_option
def command(runs: Path) -> None:
    """List the runs, oldest first. Of a long exit the beginning is shown; `paceline show` has all of it."""
    folders = RunFolder.all(runs)
    if not folders:
        click.echo(f"no runs in {runs}")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in listing([_row(folder) for folder in folders], width):
        click.echo(line)


def _row(folder: RunFolder) -> dict[str, str]:
    summary, config = folder.read_json(folder.summary), folder.read_json(folder.config)
    known = {**config.get("settings", {}), **summary}
    speed = summary.get("samples_per_s")
    return {
        "run": folder.id,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.started)),
        "exit": _first_line(str(summary.get("exit", "running or lost"))),
        "steps": str(summary.get("steps", "")),
        "workers": str(known.get("workers", "")),
        "slots": str(known.get("slots", "")),
        "samples/s": f"{speed:,.0f}" if speed else "",
        "weights": str(summary.get("weights_sha256", ""))[:12],
    }


def _first_line(text: str) -> str:
    """
    >>> _first_line("failed: two  things:\\n  one\\n  two")
    'failed: two things: …'
    """
    first, *rest = text.strip().splitlines() or [""]
    return " ".join([*first.split(), *["…"] * bool(rest)])


def listing(rows: Sequence[dict[str, str]], width: int | None) -> list[str]:
    """One line a run. The id is whole at any width; columns are left out and the exit is cut to fit."""
    columns, exit_width = list(_COLUMNS), _EXIT_AT_MOST
    if width is not None:
        wanted, spare = max(len(row["exit"]) for row in rows), list(_SPARE)
        exit_width = _room(rows, columns, width)
        while spare and exit_width < min(wanted, _EXIT_AT_LEAST):
            columns.remove(spare.pop(0))
            exit_width = _room(rows, columns, width)
    cut = [{**row, "exit": shortened(row["exit"], max(exit_width, 1))} for row in rows]
    return aligned([columns, *([row[name] for name in columns] for row in cut)])


def _room(rows: Sequence[dict[str, str]], columns: Sequence[str], width: int) -> int:
    """How wide the exit may be beside the other columns."""
    others = [max(len(name), *(len(row[name]) for row in rows)) for name in columns if name != "exit"]
    return width - sum(others) - 2 * len(others)
