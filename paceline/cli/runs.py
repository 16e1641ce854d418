"""paceline runs"""

from __future__ import annotations

import time
from pathlib import Path

import click

from paceline.cli.options import runs_option
from paceline.watch.folder import RunFolder


@click.command("runs")
@runs_option
def command(runs: Path) -> None:
    """List the runs, oldest first."""
    from rich.console import Console
    from rich.table import Table

    folders = RunFolder.all(runs)
    if not folders:
        click.echo(f"no runs in {runs}")
        return
    table = Table("run", "started", "exit", "steps", "workers", "samples/s", "weights", box=None)
    for folder in folders:
        summary, config = folder.read_json(folder.summary), folder.read_json(folder.config)
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.started))
        workers = summary.get("workers") or config.get("settings", {}).get("workers", "")
        table.add_row(
            folder.id,
            started,
            str(summary.get("exit", "running or lost"))[:40],
            str(summary.get("steps", "")),
            str(workers),
            f"{summary.get('samples_per_s', 0):,.0f}",
            str(summary.get("weights_sha256", ""))[:12],
        )
    Console(soft_wrap=True).print(table)
