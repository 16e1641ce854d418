"""Examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import paceline

NEEDS_MORE = {"paceline.notebook"}  # IPython is no requirement


def modules() -> list[str]:
    found = pkgutil.walk_packages(paceline.__path__, "paceline.")
    return sorted(m.name for m in found if not m.name.endswith("__main__") and m.name not in NEEDS_MORE)


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [t for name in modules() for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(examples) >= 5
