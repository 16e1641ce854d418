"""How a run ends before its end: any worker may wish for a stop, and all take it at the same step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from paceline.data.order import mix
from paceline.settings import StopRules
from paceline.wires.board import Stop
from paceline.worker.session import Session
from paceline.worker.terms import Terms

_EPOCH = mix(301)
_RULE, _ASKED, _ALONE, _FROM_OUTSIDE = 1, 2, 3, 4
"""A worker's wish; what comes from outside is that number plus who asked."""
_WORDS = {_RULE: "a stop rule", _ASKED: "run.stop()"}


class Stopping:
    """This worker's wish to stop, and what all have agreed on."""

    def __init__(self, session: Session, terms: Terms) -> None:
        self._session, self._terms = session, terms
        self._started = time.monotonic()
        self._rules, self._grace = StopRules.of(session.settings), session.settings.grace
        self._ruled = self._rules != StopRules()
        self._led = session.launched
        """Whether there is anybody outside who could ask."""
        self._asked: str | None = None
        self._due: str | None = None
        self.reason: str | None = None
        """Why the run was stopped before its end, if it was."""

    def ask(self, reason: str) -> None:
        """The script wants to stop; the first reason counts."""
        self._asked = self._asked or reason

    def code(self, steps: int, metrics: Mapping[str, float]) -> int:
        """What this worker says about stopping once so many steps are done; 0 if it wants to go on."""
        if self._ruled:
            # A target is worker 0's to decide: the others may log their own share's values.
            mine = metrics if self._session.is_main else {}
            self._due = self._rules.due(steps, time.monotonic() - self._started, mine)
        if self._asked:
            return _ASKED
        if self._led:
            board = self._session.board
            if stop := board.stop:
                return _FROM_OUTSIDE + stop
            if board.unled_s > self._grace:
                return _ALONE
        return _RULE if self._due else 0

    def resumed(self, step: int) -> None:
        """The run goes on from this step. If its limit is there, only what the script does behind its loops is left: a rule is
        asked behind a step, and there is to be none."""
        self.reason = StopRules(self._rules.steps).due(step, 0.0, {})
        if self.reason and self._session.is_main:
            self._session.notice(
                f"{self.reason} before: no step is left, and the code behind the loops runs now. A name that only they set is not "
                "there: set it before them"
            )

    def settle(self, codes: list[int], step: int) -> None:
        """Every worker's code is known, and one wants to stop: all do. The first one gives the reason."""
        rank = next(rank for rank, code in enumerate(codes) if code)
        self.settle_one(codes[rank], self._session.view.members[rank], step)

    def settle_one(self, code: int, who: int, step: int) -> None:
        """All stop, because this worker has said this."""
        if code > _FROM_OUTSIDE:
            self.reason = Stop(code - _FROM_OUTSIDE).words
        elif code == _ALONE:
            self.reason = f"no coordinator for {self._grace:g} s"
        else:
            self.reason = self._asked or self._due or f"{_WORDS[code]} on worker {who}"
        if self._session.is_main:
            self._session.folder.event("stopping", self.reason, step=step, worker=who)

    def agree(self, step: int, metrics: Mapping[str, float]) -> bool:
        """At an epoch's end a wish to stop need not wait for another step; whether all stop."""
        code = self.code(step, metrics)
        codes = [raw[0] for raw in self._terms.gather(_EPOCH, lambda: bytes([code]))]
        if any(codes) and not self.reason:
            self.settle(codes, step)
        return self.reason is not None
