"""`paceline strategies`: what there is to choose from."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from paceline.strategies import TABLE, Entry
from paceline.tensors import codecs


@click.command("strategies")
def command() -> None:
    """List the strategies and codecs: where workers meet, when, what they exchange, what survives, what it costs.

    \b
    paceline run -n 4 --strategy diloco:50 train.py
    paceline run -n 4 --strategy allreduce+int8 train.py
    paceline run -n 4 --servers 2 --strategy ssp:3+topk:0.01 train.py
    """
    console = Console(width=None if Console().is_terminal else 180)
    console.print(_strategies())
    console.print(_codecs())
    console.print(
        "A codec is joined by +, as in allreduce+int8, ps+onebit, ssp:3+topk:0.01 or diloco:50+int8. It pays where the network is slow; between the "
        "workers of one machine, over shared memory, it does not: see docs/benchmarks.md. Pages: docs/strategies.md"
    )


def _strategies() -> Table:
    table = Table(
        "strategy", "where", "when", "what", "codec", "any death is survived", "each worker moves (P: parameters)"
    )
    for name, entry in TABLE.items():
        coded = "any" if entry.coded else "none"
        table.add_row(
            f"{name}{entry.numbers}", entry.where, entry.when, entry.what, coded, _survives(entry), entry.moves
        )
    return table


def _survives(entry: Entry) -> str:
    if entry.apart:
        return "same bits; its workers are as many as at first"
    if entry.servers:
        kept = "every push once" if entry.free or entry.behind else "same bits"
        return f"{kept}; the server's costs the steps since a checkpoint" if entry.one else f"{kept}, 2 servers or more"
    return "same bits, at any number of workers"


def _codecs() -> Table:
    table = Table("codec", "what is sent", "what it leaves out")
    for name, entry in codecs.TABLE.items():
        table.add_row(f"{name}{entry.number}", entry.words, "goes into the next message" if entry.keeps else "is lost")
    return table
