"""`paceline verify`: what a run's receipts prove."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid

from paceline.cli.options import runs_option
from paceline.data.proof import Advance, Proof, compare, prove
from paceline.data.receipts import IDS, Table
from paceline.errors import PacelineError, UsageError
from paceline.folder import RunFolder
from paceline.state.ledger import Book, read
from paceline.watch.terminal import counted

_LONG = 50_000_000
"""Ids from which on a bar is shown: some seconds."""


@click.command("verify")
@click.argument("run")
@click.argument("other", required=False)
@runs_option
def command(run: str, other: str | None, runs: Path) -> int:
    """Prove from RUN's receipts that every sample of its epochs was trained exactly once.

    \b
    paceline verify last
    paceline verify mine yours        also: the same samples in the same steps, and whether the weights
                                      that came of them are the same (told, not judged: other slots or
                                      strategies give others)

    Exit code 1 if the receipts say otherwise or are incomplete, with the steps at fault.
    """
    accounts = [_account(RunFolder.find(runs, name)) for name in ([run, other] if other else [run])]
    found = []
    for account in accounts:
        proof = account.proof()
        _show(account, proof)
        found += [f"{account.name}: {why}" for why in proof.violations]
    if other:
        found += _compare(accounts[0], accounts[1])
    for why in found:
        click.echo(f"paceline: {why}", err=True)
    return 1 if found else 0


@dataclass
class _Account:
    """A run, as far as its receipts tell."""

    name: str
    book: Book
    table: Table
    steps: int | None
    """That the run says it trained; None if it has not come to its end."""
    weights: str
    """Their hash then."""

    def proof(self) -> Proof:
        heads = [lineage.head for lineage in self.book.lineages]
        changed = [head for head in heads if (head.dealings, head.seed) != (heads[0].dealings, heads[0].seed)]
        if changed:
            why = f"step {changed[0].first}: the run was resumed with other data (loaders, lengths, batch or seed)"
            return Proof(violations=[f"{why}, so its epochs cannot be told from each other"])
        with _bar(int(self.table[:, IDS].sum())) as advance:
            return prove(self.table, heads[0].dealings, self.steps, advance)


def _account(folder: RunFolder) -> _Account:
    try:
        book = read(folder.receipts)
    except ValueError as error:
        raise PacelineError(str(error)) from None
    table = book.table()
    if not len(table):
        raise UsageError(
            f"run {folder.id!r} has no receipts: it trained no step, or could not write to {folder.receipts} "
            "(its events say so), or comes from a version without them"
        )
    summary = folder.read_json(folder.summary)
    ended = "weights_sha256" in summary  # else it failed, and how far its workers had come was not agreed on
    steps = summary["steps"] if ended else None
    return _Account(folder.id, book, table, steps, summary.get("weights_sha256", ""))


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    """A bar where it will take a while."""
    if total < _LONG:
        yield lambda ids: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("hashing ids", total=total)
        yield lambda ids: progress.advance(task, ids)


def _show(account: _Account, proof: Proof) -> None:
    grid = Grid("", "epochs", "steps", "samples", "proven", title=f"receipts of {escape(account.name)}")
    for row in proof.checked:
        first, last = row.epochs
        epochs = str(first) if first == last else f"{first}-{last}"
        grid.add_row(row.what, epochs, f"{row.steps:,}", f"{row.samples:,}", row.proven)
    console = Console(highlight=False)
    if proof.checked:
        console.print(grid)
    resumes = f", resumed at step {', '.join(map(str, account.book.resumes))}" if account.book.resumes else ""
    ended = "" if account.steps is not None else "; the run has not come to its end (it runs, failed or was lost)"
    verdict = "[red]not proven[/red]" if proof.violations else "[green]proven[/green]"
    steps = counted(len(account.table), "step")
    console.print(f"{verdict}: {escape(account.name)}, {steps} with a receipt{resumes}{ended}", soft_wrap=True)


def _compare(one: _Account, other: _Account) -> list[str]:
    same_seed = one.book.lineages[0].head.seed == other.book.lineages[0].head.seed
    found = compare(one.table, other.table, (one.name, other.name), same_seed)
    console = Console(highlight=False)
    if not found:
        console.print(
            f"[green]the same[/green]: {escape(one.name)} and {escape(other.name)} trained the same samples (by id) in "
            f"each of {counted(len(one.table), 'step')}",
            soft_wrap=True,
        )
    if one.weights and other.weights:
        console.print(_compared(one, other), soft_wrap=True)
    return found


def _compared(one: _Account, other: _Account) -> str:
    """Their weights: told, and no fault of either, as another strategy or number of slots gives others of the same samples."""
    if one.weights == other.weights:
        return f"[green]the same weights[/green]: {one.weights[:12]}"
    return f"[yellow]other weights[/yellow]: {one.weights[:12]} and {other.weights[:12]}"
