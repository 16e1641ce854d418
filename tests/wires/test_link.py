"""How long a line looks for the next leader; without sockets that matter, and with a clock of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.wires import link
from paceline.wires.link import LeaderLink, NoLeaderError
from paceline.wires.messages import Done, Hello, Needed

GRACE_S = 60.0


class Told(LeaderLink):
    """Each leader in its turn answers, or does not: then it is gone after so many seconds."""

    def __init__(self, leaders: list[float | None], pass_by: Callable[[float], None]) -> None:
        super().__init__("nowhere", b"", Hello(0, 1), lambda: 1, GRACE_S)
        self._leaders, self._pass_by = leaders, pass_by

    def attempt(self) -> tuple[Any, list[int]]:
        if not self._leaders:
            raise ConnectionError("nobody is there")
        self._socket = socket.socket()
        return Done(), []

    def _exchange(self, message: Any, check: Callable[[], None]) -> tuple[Any, list[int]]:
        seconds = self._leaders.pop(0)
        if seconds is None:
            return Done(), []
        self._pass_by(seconds)
        raise ConnectionError("it is gone")


@pytest.fixture
def pass_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pass_by))
    return pass_by


def asked(line: Told) -> Any:
    try:
        return line.ask(Needed())[0]
    finally:
        line.close()


def test_a_question_that_has_waited_long_is_put_to_the_next_leader(pass_by: Callable[[float], None]) -> None:
    """A spare waits to be needed, a server for the next layout: for hours, maybe."""
    assert asked(Told([2 * GRACE_S, 3 * GRACE_S, None], pass_by)) == Done()


def test_who_finds_nobody_gives_up_and_so_does_who_is_always_sent_away(pass_by: Callable[[float], None]) -> None:
    for leaders in ([], [2 * GRACE_S], [0.0] * 100_000):
        with pytest.raises(NoLeaderError, match="no agent has led the run for 60 s"):
            asked(Told(list(leaders), pass_by))
