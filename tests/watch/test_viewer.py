"""What a terminal does when nobody answers it."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.rendezvous import Rendezvous
from paceline.folder import RunFolder
from paceline.watch import viewer
from paceline.watch.terminal import Terminal
from paceline.wires.board import Board


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


def test_it_waits_for_every_agent_that_ended_the_run_whoever_it_last_heard_of(
    unanswered: viewer.Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaders follow each other, and the end is read in a file; one may be replaced in the middle of it. When a command returns,
    nothing of its run is left."""
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as one,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as other,
    ):
        agents, plain = [one, other], select.select

        def end() -> None:
            fields = {"exit_code": 5 - len(agents), "pid": agents[0].pid, "machine": 0}
            unanswered._folder.event("ended", "finished", **fields)

        def wait(read: list[int], *rest: Any) -> Any:
            ends = agents.pop(0)
            assert ends.poll() is None and ends.stdin is not None
            ends.stdin.close()
            if agents:
                end()
            return plain(read, *rest)

        unanswered._know_leader(os.getpid())
        unanswered._listen = end  # type: ignore[method-assign]
        monkeypatch.setattr(viewer.select, "select", wait)
        assert unanswered.watch() == 4 and not agents
        for agent in (one, other):
            # Not reaped by a wait of this test's: it had ended by then.
            assert Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
