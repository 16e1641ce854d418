"""The training loop of replicas that train apart: each worker its own share of every batch, with an optimizer of its own,
until they meet.

Behind each exchange a replica leaves its whole state in a locker (`state.lockers`). If its worker dies, a newcomer takes
the locker over and trains the rest from there: the same samples, the same random numbers, the same bits. The others see
nothing of that until they meet; there they wait for it. One that died behind an exchange, before its state was in the
locker, has missed that exchange when it comes again: it takes what the others have had behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cluster.board import Phase
from paceline.data.loader import Feed
from paceline.data.order import mix
from paceline.data.random import IN_SHARE, set_seed
from paceline.data.receipts import OWN_DRAWS, SAMPLES, Loose, Receipt, Tally, settled, table
from paceline.state.lockers import Locker
from paceline.state.snapshot import Snapshot
from paceline.steps import Batch
from paceline.tensors.peers import TermEnded
from paceline.tensors.tree import Plan

if TYPE_CHECKING:
    from paceline.run import Run
    from paceline.steps import Stepper
    from paceline.strategies.averaging import Averaging, Gift

_WORDS, _STATES, _SHIPPED = mix(501), mix(503), mix(504)
_POLL_S = 0.001


class Word(msgspec.Struct, array_like=True):
    """What a replica says before an exchange."""

    rounds: int
    slot: int
    stop: int
    term: int
    drift: float
    receipts: list[list[int]]
    """Of the steps that it has trained since the last one: its own shares."""


class Rounds:
    def __init__(self, run: Run, strategy: Averaging, stepper: Stepper) -> None:
        self._run, self._strategy, self._stepper = run, strategy, stepper
        self._session, self._slots = run._session, run.settings.slots
        self._lockers: dict[int, Locker] = {}
        self.slot = -1
        self._given: Gift | None = None
        """What is exchanged now, if the result is not in yet."""
        self._receipts: list[Receipt] = []
        self._left = False
        self._samples = 0
        """Of the whole run, at the last exchange."""
        stepper.stop_code, stepper.delivered = int, self._delivered
        if not self._session.joining:
            self._take_slot([self._session.rank, *range(self._slots)])

    # which replica this is

    def _take_slot(self, slots: Sequence[int]) -> None:
        """The first of these that nobody has; wait for one."""
        session = self._session
        free = slots[0] if not session.launched or session.dry_run else None
        while free is None:
            session.check_run()
            time.sleep(_POLL_S)
            free = next((slot for slot in slots if self._locker(slot).claim()), None)
        self.slot, self._stepper.mine = free, [free]

    def begin(self) -> None:
        """Whoever dies from now on has left a state."""
        self._samples = self._stepper.samples
        if self._session.launched and self._locker(self.slot).empty:
            self._keep()

    def enter(self) -> None:
        """A newcomer takes the place of a replica whose worker is dead, and goes on from the state that it has left."""
        session = self._session
        session.row.enter(Phase.JOINING)
        session.needed()
        self._take_slot([slot for slot in range(self._slots) if not self._locker(slot).empty] or range(self._slots))
        self._run._keeping.restore(Snapshot.read(self._first_state()))
        self._samples = self._stepper.samples
        session.row.enter(Phase.SCRIPT)

    def _first_state(self) -> memoryview:
        """One that died before it had left any began as all others did."""
        while True:
            for locker in (self._locker(slot) for slot in (self.slot, *range(self._slots))):
                if not locker.empty:
                    assert locker is self._locker(self.slot) or not locker.rounds, f"slot {self.slot} has left no state"
                    return locker.look()
            self._session.check_run()
            time.sleep(_POLL_S)

    def _locker(self, slot: int) -> Locker:
        if slot not in self._lockers:
            self._lockers[slot] = Locker(slot, self._session.segment)
        return self._lockers[slot]

    def _keep(self) -> None:
        """The state of right now is what a newcomer would go on from."""
        if self._session.launched:
            self._locker(self.slot).put(self._strategy.rounds, self._run._keeping.capture())

    # loops

    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        run, stepper = self._run, self._stepper
        self.come_together()
        epoch = stepper.epoch
        number = run._feeding.position(loader, epoch)
        stepper.gaps.begin()
        self._session.left = None
        feed.start(epoch, number, [self.slot])
        try:
            while not run.stopped and (feed.steps is None or number < feed.steps):
                start = time.perf_counter()
                self._session.row.enter(Phase.DATA)
                batch = Batch(stepper, feed, loader, epoch, number)
                if batch.sizes is not None and not any(batch.sizes) and feed.steps is None:
                    break
                share = batch.share(self.slot)
                stepper.split.data += time.perf_counter() - start
                self._begin_step(batch, start)
                if share is not None:  # else it has no sample of this batch, and sits the step out
                    yield share.value
                stepper.end()
                number += 1
                run._feeding.positions_at(loader, epoch, number)
                self._at_boundary()
            self._close()
        except GeneratorExit:
            if stepper.abandon():
                run._feeding.positions_at(loader, epoch, number + 1)
            self._left = True
            raise
        finally:
            feed.stop()

    def over_steps(self, count: int) -> Iterator[int]:
        run, stepper = self._run, self._stepper
        self.come_together()
        stepper.gaps.begin()
        limit = run.settings.steps
        try:
            for number in range(stepper.step, min(count, limit or count)):
                self._begin_step(None, time.perf_counter())
                yield number
                stepper.end()
                self._at_boundary()
                if run.stopped:
                    break
            self._close()
        except GeneratorExit:
            stepper.abandon()
            self._left = True
            raise

    def _begin_step(self, batch: Batch | None, since: float) -> None:
        stepper = self._stepper
        stepper.begin(batch, since)
        stepper.slot = self.slot
        set_seed(mix(self._run.settings.seed, IN_SHARE, stepper.step, 0, self.slot), self._run.device)

    def _delivered(self, batch: Batch | None, tally: Tally | Loose) -> None:
        stepper = self._stepper
        loader, number = (OWN_DRAWS, stepper.leaves) if batch is None else (batch.loader, batch.number)
        self._receipts.append(Receipt(stepper.step, stepper.epoch, loader, number, *tally))
        self._strategy.trained(tally.samples)

    def _at_boundary(self) -> None:
        """A step is over."""
        step, rhythm = self._stepper.step, self._strategy.rhythm
        if step == self._run.settings.steps:
            self._close()
            return
        if rhythm.overlap and self._given is not None and rhythm.takes(step):
            self._meet()
        fragment = rhythm.gives(step)
        if fragment is not None:
            self._given = self._strategy.give(fragment)
            if not rhythm.overlap:
                self._meet()

    def come_together(self) -> None:
        """The script has left a loop in the middle."""
        if self._left:
            self._left = False
            self._close()

    def _close(self) -> None:
        """Everybody's weights are the same behind this, whatever has been trained since they were last."""
        if self._given is not None:
            self._meet()
        if self._strategy.apart:
            self._given = self._strategy.give(None)
            self._meet()

    def collect(self) -> None:
        return

    # an exchange

    def _meet(self) -> None:
        """What was given is exchanged, and what became of it comes in."""
        gift, self._given = self._given, None
        assert gift is not None
        stepper = self._stepper
        start, waited = time.perf_counter(), self._run.terms.meeting.waited_s
        self._session.row.enter(Phase.REDUCE)
        self._session.at = f"the exchange after step {stepper.step}"
        self._exchange(gift)
        self._receipts = []
        self._keep()
        wait = self._run.terms.meeting.waited_s - waited
        spent = time.perf_counter() - start
        stepper.split.wait += wait
        stepper.split.communication += spent - wait
        stepper.split.total += spent
        self._run._keeping.at_boundary()
        self._session.at = f"the code after step {stepper.step}"

    def _exchange(self, gift: Gift) -> None:
        """Meet the others for it, and take what became of it."""
        terms, strategy = self._run.terms, self._strategy
        terms.catching_up = False
        while True:
            try:
                if self._session.joining:
                    terms.come_in()
                terms.refill(self._slots, None)
                words = self._said()
                newest = max(word.rounds for word in words)
                if any(word.rounds < newest for word in words):
                    common = self._shipped([word.rounds for word in words].index(newest))
                    if strategy.rounds < newest:
                        self._catch_up(gift, common)
                        return
                    continue  # it trains until it is here again
                strategy.exchange(gift, self.slot, Plan(self._slots, tuple(((w.slot, w.slot + 1),) for w in words)))
                break
            except TermEnded:
                terms.next()
        terms.committed(self._stepper.step)
        strategy.take(gift, self._own_part(gift))
        self._settle(words)

    def _own_part(self, gift: Gift) -> float:
        """What this replica's weights count for beside what all have come to; nothing, where everything is exchanged."""
        return self._strategy.rhythm.mix if len(gift.fragments) < self._strategy.rhythm.fragments else 0.0

    def _said(self) -> list[Word]:
        run = self._run
        stop, term = run._stopping.code(self._stepper.step, run.metrics), self._session.next_term
        receipts = settled(self._receipts).tolist()
        mine = Word(self._strategy.rounds, self.slot, stop, term, self._strategy.drift, receipts)
        said = run.terms.peers.gather(_WORDS, msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(word, type=Word) for word in said]

    def _settle(self, words: list[Word]) -> None:
        """All have met: each step that they have trained since is whole now."""
        run, stepper = self._run, self._stepper
        self._strategy.met.add(len(words), [word.drift for word in words if word.rounds])
        columns = table([receipt for word in words for receipt in word.receipts]).reshape(
            len(words), -1, len(Receipt._fields)
        )
        for shares in columns.swapaxes(0, 1):
            step, epoch, loader, batch = shares[0, :SAMPLES].tolist()
            tally = Tally.total(shares[:, SAMPLES:])
            self._samples += tally.samples
            if run._keeping.ledger.add(Receipt(step, epoch, loader, batch, *tally)) and run.is_main:
                run._keeping.ledger.write()
        stepper.samples = self._samples
        stepper.agreed_term = min(word.term for word in words)
        codes = [word.stop for word in words]
        if any(codes) and not run.stopped:
            run._stopping.settle(codes, stepper.step)

    def _shipped(self, giver: int) -> Snapshot:
        """What all have had in common behind the last exchange, from one who has had it."""
        mine = self._run.terms.peers.rank == giver
        said = self._run.terms.peers.gather(
            _SHIPPED, self._run._keeping.common(self._samples).to_bytes() if mine else b""
        )
        return Snapshot.read(memoryview(said[giver]))

    def _catch_up(self, gift: Gift, common: Snapshot) -> None:
        """The others have had this exchange, and wait in the next one."""
        self._strategy.catch_up(gift, self.slot, self._slots, self._own_part(gift), common.tree["strategy"])
        self._run._keeping.catch_up(common)
        self._samples = self._stepper.samples
        self._stepper.agreed_term = self._session.view.term
        self._run.terms.catching_up = True  # until the next exchange: what is met before, they have met

    # checkpoints

    def states(self) -> list[bytes]:
        """Every replica's, in the order of slots, for main; all meet for that."""
        session = self._session
        if not session.launched:
            return []
        home = session.homes[session.view.members[0]]
        far = session.homes[session.worker] != home
        brought = self._run.terms.gather(
            _STATES, lambda: self.slot.to_bytes(8, "little") + (bytes(self._locker(self.slot).look()) if far else b"")
        )
        if not self._run.is_main:
            return []
        found = {int.from_bytes(said[:8], "little"): said[8:] for said in brought}
        return [found[slot] or bytes(self._locker(slot).look()) for slot in sorted(found)]
