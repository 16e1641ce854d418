"""Where replicas that train apart come together before an exchange: they wait for who is lost, or go on without it.

What is decided there is in `strategies.presence`; here are the clock, the others' words and the events.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.data.order import mix
from paceline.strategies.presence import Deal, Drop, Enter, Follow, Here, Meet, Wait, decide, names
from paceline.worker import waiting

if TYPE_CHECKING:
    from paceline.run import Run
    from paceline.strategies.averaging import Averaging

_HERE = mix(505)


class Attendance:
    def __init__(self, run: Run, strategy: Averaging) -> None:
        self._run, self._strategy, self._settings = run, strategy, run.settings
        self.deal: Deal = [list(range(run.settings.slots))]
        """Of the round in hand: see `presence`."""

    @property
    def drops(self) -> bool:
        """Whether the run goes on without a replica that is lost for long."""
        return self._settings.on_death == "drop"

    def assemble(self, slot: int, rounds: int, least: int) -> bool:
        """Wait until the exchange can be. False: the round is dealt anew, and this replica has to see what that means for
        it."""
        terms = self._run.terms
        if not self.drops:
            terms.refill(self._settings.slots, None)
            return True
        terms.begin_anew()
        session, since, told = self._run._session, 0.0, ""
        waits: Wait | None = None

        def here() -> bytes:
            until = since + self._settings.drop_after
            if waits is not None:
                waiting.for_change(session, None if waits.below else until, least)
            late = waits is not None and time.monotonic() >= until
            return msgspec.msgpack.encode(Here(slot, rounds, session.next_term, late, self.deal))

        while True:
            said = [msgspec.msgpack.decode(raw, type=Here) for raw in terms.gather(_HERE, here)]
            decision, waits = decide(said, session.view.term, least), None
            match decision:
                case Meet():
                    return True
                case Enter(term):
                    terms.enter(term)
                case Follow(deal) if deal != self.deal:
                    self._go_on_with(deal)
                    return False
                case Drop(slots, why):
                    self._tell("dropped", why, slots=slots)
                    self._go_on_with([*self.deal, [slot for slot in self.deal[-1] if slot not in slots]])
                    return False
                case Wait():
                    waits = decision
                    if waits.why != told:
                        since, told = time.monotonic(), waits.why
                        self._tell("waiting", told)

    def _go_on_with(self, deal: Deal) -> None:
        self._strategy.dropped += [[slot, self._run.step] for slot in self.deal[-1] if slot not in deal[-1]]
        self.deal = deal

    def begin_round(self, slots: Sequence[int]) -> None:
        """These have met, and go on together."""
        back = [slot for slot in slots if slot not in self.deal[-1]]
        if back:
            self._tell("returned", f"{names(back)} in the run again", slots=back)
        self._strategy.present = sorted(slots)
        self.go_on()

    def go_on(self) -> None:
        """From the state of a replica, of which the strategy knows who was in the round."""
        self.deal = [self._strategy.present or list(range(self._settings.slots))]

    def _tell(self, event: str, why: str, **more: object) -> None:
        if self._run.is_main:
            self._run._session.folder.event(event, why, step=self._run.step, notice=why, **more)
