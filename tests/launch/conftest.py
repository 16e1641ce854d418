"""One nursery for all tests of this room that leave it alone: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.nursing import Nursery
from tests.launch.visiting import SECRET, Visitor, environment, new_address, visiting


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it listens."""
    where = new_address()
    nursery = Nursery.start(environment(), tmp_path_factory.mktemp("nursery") / "log", where, SECRET)
    yield where
    nursery.quit()


@pytest.fixture
def visitor(address: str, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(Nursery.connect(address, SECRET), tmp_path) as found:
        yield found
