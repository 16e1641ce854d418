"""Real runs by the real command, whose nurseries are warm."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def from_a_warm_process(warm: None) -> None: ...
