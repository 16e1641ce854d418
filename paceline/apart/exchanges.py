"""An exchange of replicas that train apart, as one of them sees it: from the word that each says before it to what is
settled behind it, and what becomes of one that has missed some."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paceline.apart.attendance import Attendance
from paceline.apart.beside import Beside, State, Verdict, decide
from paceline.data.order import mix
from paceline.data.receipts import SAMPLES, STEP, Receipt, Tally, settled, table
from paceline.errors import MismatchError
from paceline.strategies.averaging import Circle
from paceline.tensors.peers import Peers, TermEnded
from paceline.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from paceline.loop.steps import Stepper
    from paceline.run import Run
    from paceline.strategies.averaging import Averaging, Gift

_WORDS, _SHIPPED, _BESIDE, _HAD = mix(501), mix(504), mix(506), mix(507)
_MOMENT_S = 0.05
_PLACE = struct.Struct("<qq")
"""A replica's slot, and the exchanges it has had."""


class Word(msgspec.Struct, array_like=True):
    """What a replica says before an exchange."""

    rounds: int
    slot: int
    stop: int
    term: int
    drift: float
    everything: bool
    """Whether behind this one all weights are the same everywhere."""
    present: list[int]
    """The slots of who is in the round."""
    beside: int
    """How far it is with the same beside the training: see `beside.State`."""
    step: int
    """Where it is in the training."""
    owes: bool
    """Whether a checkpoint was due and could not be had; main knows."""
    receipts: list[list[int]]
    """Of the steps that it has trained since the last one: its own shares."""


class Exchanges:
    def __init__(self, run: Run, strategy: Averaging, stepper: Stepper) -> None:
        self._run, self._strategy, self._stepper = run, strategy, stepper
        self._session, self._slots = run._session, run.settings.slots
        self.slot = -1
        self.attendance = Attendance(run, strategy)
        self._beside = strategy.beside = Beside(run._session)
        self._behind: Snapshot | None = None
        """Others have gone on without this replica: what they have at the exchange that it has to come to."""
        self.samples = 0
        """Of the whole run, at the last exchange."""
        self.copied: Callable[[], None] = lambda: None
        """Waits until this replica's state is where a lost machine does not take it."""

    @property
    def sits_out(self) -> bool:
        """Whether others train this replica's shares."""
        return self.slot not in self.attendance.deal[-1]

    @property
    def is_behind(self) -> bool:
        """Whether it has no part in the exchanges that it comes to."""
        return self._behind is not None

    def begin(self) -> None:
        """From the state that this replica has now."""
        self.samples = self._stepper.samples
        self.attendance.go_on()
        if self.sits_out:
            self._strategy.begin_anew()

    def start(self, gift: Gift) -> None:
        """Carry it out from now on, beside the training, where all who should be in it are at the same place."""
        alike = not (self._session.joining or self._run.terms.catching_up or self.is_behind)
        if not alike or len(self.attendance.deal[-1]) != self._session.workers:
            return
        strategy, slot, leaves, rounds = self._strategy, self.slot, self._slots, self._strategy.rounds

        def hold(peers: Peers) -> None:
            said = [_PLACE.unpack(raw) for raw in peers.gather(_BESIDE, _PLACE.pack(slot, rounds))]
            assert {theirs for _, theirs in said} == {rounds}, (
                f"exchanges beside the training at different places: {said}"
            )
            slots = [theirs for theirs, _ in said]
            strategy.exchange(gift, slot, Circle(slots, sorted(slots), leaves, 0), peers)

        self._beside.start(rounds, hold)

    def exchange(self, gift: Gift, receipts: Sequence[Receipt], least: int) -> bool:
        """Meet the others for it, `least` at least, and take what became of it. False: the round was dealt anew before."""
        try:
            return self._exchange(gift, receipts, least)
        finally:
            self._beside.end()

    def _exchange(self, gift: Gift, receipts: Sequence[Receipt], least: int) -> bool:
        terms, strategy = self._run.terms, self._strategy
        terms.catching_up = False
        if self._behind is not None:
            if not self._arrives(self._behind):
                self._miss(gift)
                return True
            gift = strategy.given_by_another(gift)
        while True:
            try:
                if self._session.joining:
                    terms.come_in()
                if not self.attendance.assemble(self.slot, strategy.rounds, least):
                    return False
                self.copied()
                words = self._said(gift, receipts)
                newest = max(word.rounds for word in words)
                _refuse_other_places([word for word in words if word.rounds == newest])
                if any(word.rounds < newest for word in words):
                    missed = strategy.rounds < newest
                    self._beside.end()
                    self._help(gift, words, newest)
                    if missed:
                        return True
                    continue  # it trains until it is here again
                if not self._was_beside(gift, words):
                    strategy.exchange(gift, self.slot, self._circle(words))
                break
            except TermEnded:
                terms.next()
        terms.committed(self._stepper.step)
        strategy.take(gift)
        self._settle(words)
        return True

    def _was_beside(self, gift: Gift, words: Sequence[Word]) -> bool:
        """Whether all have had the same exchange beside the training. What they have then counts; else it is had again, with
        the same result."""
        said = [word.beside for word in words]
        while decide(said) is Verdict.WAIT:
            # Not until it is over: who has given it up is waited for there, and says so here.
            self._beside.wait(_MOMENT_S)
            said = [mine[0] for mine in self._run.terms.peers.gather(_HAD, bytes([self._beside.state]))]
        if State.LACKING in said:
            self._beside.lacks()
        # Who has met there is who meets now, or a replica was lost since.
        had = decide(said) is Verdict.TAKE and gift.met == sorted(word.slot for word in words)
        if had:
            self._beside.taken()
        else:
            self._beside.end()
        return had

    def _circle(self, words: Sequence[Word], met: Sequence[int] = ()) -> Circle:
        slots = [word.slot for word in words]
        return Circle(slots, sorted(met or slots), self._slots, self._run.settings.seed)

    def _said(self, gift: Gift, receipts: Sequence[Receipt]) -> list[Word]:
        run, strategy = self._run, self._strategy
        stop, term = run._stopping.code(self._stepper.step, run.metrics), self._session.next_term
        mine = Word(
            strategy.rounds,
            self.slot,
            stop,
            term,
            strategy.drift,
            gift.everything,
            self.attendance.deal[-1],
            self._beside.state,
            self._stepper.step,
            run._keeping.owes,
            [] if self.sits_out else settled(receipts).tolist(),
        )
        said = run.terms.peers.gather(_WORDS, msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(word, type=Word) for word in said]

    def _settle(self, words: list[Word]) -> None:
        """All have met: each step that they have trained since is whole now."""
        run, stepper = self._run, self._stepper
        there = sum(word.slot in word.present for word in words)
        self._strategy.met.add(there, [word.drift for word in words if word.rounds])
        rows = table([receipt for word in words for receipt in word.receipts])
        for number in np.unique(rows[:, STEP]):
            shares = rows[rows[:, STEP] == number]
            step, epoch, loader, batch = shares[0, :SAMPLES].tolist()
            tally = Tally.total(shares[:, SAMPLES:])
            self.samples += tally.samples
            if run._keeping.ledger.add(Receipt(step, epoch, loader, batch, *tally)) and run.is_main:
                run._keeping.ledger.write()
        stepper.samples = self.samples
        self.attendance.begin_round([word.slot for word in words])
        # Whoever comes where replicas may be dropped comes in where they come together.
        stepper.agreed_term = run._session.view.term if self.attendance.drops else min(word.term for word in words)
        run._keeping.owed(any(word.owes for word in words))
        codes = [word.stop for word in words]
        if any(codes) and not run.stopped:
            run._stopping.settle(codes, stepper.step)

    # one who has missed exchanges

    def _help(self, gift: Gift, words: Sequence[Word], newest: int) -> None:
        """Some have missed what the others have had: they get what came of it, and these wait in the next one."""
        strategy, first = self._strategy, next(word for word in words if word.rounds == newest)
        ahead = [word.slot for word in words if word.rounds == newest]
        behind = [word for word in words if word.rounds < newest and word.slot in first.present]
        circle = self._circle(words, first.present)
        sources = {word.slot: strategy.source(word.slot, ahead, circle, newest - 1, word.everything) for word in behind}
        shipped = self._shipped([first.slot, *sources.values()], words)
        lost = self.slot in sources and sources[self.slot] is None
        if None in sources.values():
            strategy.exchange_again(gift if lost else None, self.slot, circle, newest - 1)
        if self.slot in sources:
            source = sources[self.slot]
            self._catch_up(gift, shipped[first.slot], None if source is None else shipped[source])
        elif self.slot not in ahead:
            self._behind, self.attendance.deal = shipped[first.slot], [first.present]
            self._miss(gift)

    def _shipped(self, givers: Sequence[int | None], words: Sequence[Word]) -> dict[int, Snapshot]:
        """What these have had behind the last exchange; and all of their replicas, if one who was dropped has to go on from
        there."""
        first = next(word for word in words if word.slot in givers)
        whole = any(word.slot not in first.present for word in words)
        mine = self._run._keeping.common(self.samples, whole).to_bytes() if self.slot in givers else b""
        said = self._run.terms.peers.gather(_SHIPPED, mine)
        slots = [word.slot for word in words]
        return {slot: Snapshot.read(memoryview(raw)) for slot, raw in zip(slots, said, strict=True) if raw}

    def _catch_up(self, gift: Gift, common: Snapshot, source: Snapshot | None) -> None:
        """The others have had this exchange, and wait in the next one. Without a source it has just been had again."""
        if source is None:
            self._strategy.take(gift)
            self._strategy.take_history(common.tree["strategy"])
        else:
            self._strategy.catch_up(gift, self.slot, self._slots, source.tree["strategy"])
        self._run._keeping.catch_up(common)
        self.samples = self._stepper.samples
        self.attendance.go_on()
        self._apart_from_others()

    def _miss(self, gift: Gift) -> None:
        """An exchange that the others have had without this replica."""
        self._strategy.forget()
        self._strategy.miss(gift)
        self._apart_from_others()

    def _apart_from_others(self) -> None:
        """Until the next exchange: what is met before, they have met."""
        self._stepper.agreed_term = self._session.view.term
        self._run.terms.catching_up = True

    def _arrives(self, common: Snapshot) -> bool:
        """Whether this is the exchange at which the others wait; then this replica goes on as one of theirs."""
        if self._strategy.rounds < common.tree["strategy"]["rounds"]:
            return False
        self._behind = None
        self._run._replica.restore(common.tree["replica"])
        self._run._keeping.restore_registered(common.tree["registered"])
        self._strategy.take_common(common.tree["strategy"])
        self._run._keeping.catch_up(common)
        self.samples = self._stepper.samples
        return True


def _refuse_other_places(words: Sequence[Word]) -> None:
    """At the same exchange in other steps: what they bring is of different training."""
    if len({word.step for word in words}) > 1:
        places = ", ".join(f"replica {word.slot} at step {word.step}" for word in words)
        raise MismatchError(
            f"the workers came to different places in the script ({places}, all to exchange {words[0].rounds + 1}): leave a loop only "
            "on a condition that is the same on all, such as one of run.step"
        )
