"""`paceline strategies`: a line for everything there is."""

from __future__ import annotations

from click.testing import CliRunner

from paceline.cli.strategies import command
from paceline.strategies import TABLE, find
from paceline.tensors import codecs


def test_it_lists_every_strategy_and_codec_as_it_can_be_written() -> None:
    shown = CliRunner().invoke(command).output
    for name, entry in TABLE.items():
        assert find(f"{name}{entry.numbers}") == entry
        assert f"│ {name}{entry.numbers}"[:20] in shown
    for name, entry in codecs.TABLE.items():
        assert codecs.is_codec(f"{name}{entry.number}") and f"│ {name}{entry.number} " in shown
