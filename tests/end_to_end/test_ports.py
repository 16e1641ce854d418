"""The ports in examples/ports: few lines changed, and the same weights at 1 and 3 workers."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import launch

PORTS = Path(__file__).resolve().parents[2] / "examples" / "ports"


def changed_lines(plain: Path, port: Path) -> int:
    """As `diff -w` counts: for each hunk the larger of added and removed; indentation does not count."""
    before, after = ([line.strip() for line in path.read_text().splitlines()] for path in (plain, port))
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


@pytest.mark.parametrize(("name", "steps"), [("mnist", 36), ("nanogpt", 24), ("dcgan", 24)])
def test_a_port_is_few_lines_and_one_hash(tmp_path: Path, name: str, steps: int, alone: Alone) -> None:
    """Some steps into the second epoch, or behind the second evaluation."""
    assert 0 < changed_lines(PORTS / f"{name}_plain.py", PORTS / f"{name}.py") <= 6
    one = alone(tmp_path, PORTS / f"{name}.py", slots=6, steps=steps)
    assert (
        one.weights == launch(tmp_path, PORTS / f"{name}.py", "-n", "3", "--slots", "6", "--steps", str(steps)).weights
    )
