"""What a terminal does when nobody answers it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from paceline.cluster.board import Board
from paceline.cluster.rendezvous import Rendezvous
from paceline.watch import viewer
from paceline.watch.folder import RunFolder
from paceline.watch.terminal import Terminal


@pytest.fixture
def unanswered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> viewer.Viewer:
    """It had a leader's board, and nobody listens where that was."""
    monkeypatch.setattr(viewer, "_LOST_S", 0.3)
    folder = RunFolder.create(tmp_path, secrets.token_hex(4))
    place = Rendezvous.create(folder)
    watching = viewer.Viewer(folder, place, Terminal(1), "none")
    watching._board = Board.create(1)
    return watching


def test_a_run_that_is_led_goes_on_without_its_terminal_being_answered(unanswered: viewer.Viewer) -> None:
    """A coordinator that is cut off for longer than a terminal has patience."""
    board, told = unanswered._board, 0
    assert board is not None
    board.led()
    plain = unanswered._listen

    def listen() -> None:
        nonlocal told
        told += 1
        if told < 10:  # a second of ticks: three times its patience
            board.led()
        plain()
        if told == 10:
            assert unanswered._exit_code is None
            unanswered._folder.event("ended", "finished", exit_code=7)

    unanswered._listen = listen  # type: ignore[method-assign]
    assert unanswered.watch() == 7


def test_a_run_that_nobody_leads_any_more_is_given_up(unanswered: viewer.Viewer) -> None:
    assert unanswered._board is not None
    unanswered._board.led()
    assert unanswered.watch() == 1
