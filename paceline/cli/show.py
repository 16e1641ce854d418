"""paceline show"""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.watch.folder import RunFolder


@click.command("show")
@runs_option
@click.argument("run")
def command(run: str, runs: Path) -> None:
    """Show one run: its result, its settings with their origins, its events.

    RUN is a run's id, the beginning of one, or 'last'.
    """
    from rich.console import Console
    from rich.table import Table

    from paceline.watch.terminal import summary_rows

    folder = RunFolder.find(runs, run)
    console = Console(soft_wrap=True, highlight=False)
    summary, config = folder.read_json(folder.summary), folder.read_json(folder.config)
    result = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary or {"exit": "running, or lost"}, str(folder.path)):
        result.add_row(f"[bold]{name}[/bold]", value)
    console.print(result)
    settings = Table("setting", "value", "from", box=None, padding=(0, 2, 0, 0))
    for name, value in config.get("settings", {}).items():
        settings.add_row(name, str(value), config.get("origins", {}).get(name, ""))
    console.print()
    console.print(settings)
    console.print()
    first = None
    for event in folder.read_lines(folder.events):
        first = first or event["time"]
        moment = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        console.print(f"{moment}  {event['event']}: {event['why']}", markup=False)
