"""A process that enters a run by itself, and leaves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.errors import UsageError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PACELINE_TICKET", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_finished_run_of_one_lets_go_of_everything(tmp_path: Path) -> None:
    """Its board is a memfd; the leak fixture sees to it that the descriptor is closed."""
    run = paceline.init(seed=4)
    folder = run.dir
    run.finish()
    assert folder.parent == tmp_path / "runs"
    assert json.loads((folder / "summary.json").read_text())["seed"] == 4
    assert json.loads((folder / "config.json").read_text())["origins"]["seed"] == "argument"


def test_a_second_run_may_follow_a_finished_one_but_not_an_open_one() -> None:
    first = paceline.init()
    with pytest.raises(UsageError, match=r"test_session.py:\d+: paceline.init\(\) was called twice"):
        paceline.init()
    first.finish()
    second = paceline.init()
    assert second is not first
    second.finish()


def test_the_number_of_workers_is_not_the_scripts() -> None:
    with pytest.raises(UsageError, match="chosen at launch"):
        paceline.init(workers=2)
