"""The training loop of replicas that train apart: each worker its own share of every batch, with an optimizer of its own,
until they meet.

Behind each exchange a replica leaves its whole state in a locker (`state.lockers`). If its worker dies, a newcomer takes
the locker over and trains the rest from there: the same samples, the same random numbers, the same bits. The others see
nothing of that until they meet; there they wait for it. One that died behind an exchange, before its state was in the
locker, has missed that exchange when it comes again: it takes what the others have had behind it. On several machines
the newcomer may be on another one, and the state in another one's locker (`copies`).

With `--on-death drop` they go on without one that is lost for long (`attendance`): before the exchange they train the shares
that it had in this round, and from then on its part of every batch. Whoever takes its place later sits out until it
is at an exchange with the others, has nothing to bring there, and is in from then on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.apart.copies import Copies
from paceline.apart.exchanges import Exchanges
from paceline.data.loader import Feed, Share
from paceline.data.order import mix
from paceline.data.pieces import NOTHING
from paceline.data.random import IN_SHARE, set_seed
from paceline.data.receipts import NO_TALLY, OWN_DRAWS, Loose, Receipt, Tally
from paceline.errors import UsageError
from paceline.loop.feeding import refuse_two_at_once
from paceline.loop.schedules import OwnSchedule, held
from paceline.loop.steps import Batch
from paceline.state.lockers import Locker, Lockers
from paceline.strategies.presence import Deal, owed, taken_over
from paceline.tensors.snapshot import Snapshot
from paceline.wires.board import Phase
from paceline.worker.session import user_line

if TYPE_CHECKING:
    from paceline.loop.steps import Stepper
    from paceline.run import Run
    from paceline.strategies.averaging import Averaging, Gift

_STATES = mix(503)
_POLL_S, _AGAIN_S = 0.001, 0.5


class Rounds:
    def __init__(self, run: Run, strategy: Averaging, stepper: Stepper) -> None:
        self._run, self._strategy, self._stepper = run, strategy, stepper
        self._session, self._slots = run._session, run.settings.slots
        self._copies = Copies(self._session) if self._session.apart else None
        self._lockers = self._copies.lockers if self._copies is not None else Lockers(self._session.segment)
        self.slot = -1
        self._given: Gift | None = None
        """What is exchanged now, if the result is not in yet."""
        self._receipts: list[Receipt] = []
        self._left = self._in_loop = self._over = False
        self._kept_in = -1
        """The epoch of the state in the locker."""
        self._feed: Feed | None = None
        """Of the loop in hand."""
        self._ends = False
        """Whether that loop ends with this step, and the next one has an exchange before its own end."""
        self._at_end = False
        """Whether that loop ends with this step, as far as it is known."""
        self._exchanges = Exchanges(run, strategy, stepper)
        if self._copies is not None:
            self._exchanges.copied = self._copies.wait
        schedulers = run._replica.schedulers if self._exchanges.attendance.drops else []
        self._schedules = [OwnSchedule(scheduler) for scheduler in schedulers]
        stepper.stop_code, stepper.delivered = int, self._delivered
        if not self._session.joining:
            self._take_slot([self._session.rank, *range(self._slots)])

    # which replica this is

    def _take_slot(self, slots: Sequence[int]) -> None:
        """The first of these that nobody has; wait for one."""
        session = self._session
        free = slots[0] if not session.launched or session.dry_run else None
        if self._copies is not None:
            slots = [self._copies.claim(list(slots))]
        while free is None:
            session.check_run()
            time.sleep(_POLL_S)
            free = next((slot for slot in slots if self._locker(slot).claim()), None)
        self.slot = self._exchanges.slot = free
        self._stepper.mine = [free]

    @property
    def copied_bytes(self) -> int:
        return self._copies.sent_bytes if self._copies is not None else 0

    def begin(self) -> None:
        """Whoever dies from now on has left a state."""
        self._exchanges.begin()
        if self._session.launched and self._locker(self.slot).empty:
            self._keep()

    def enter(self) -> None:
        """A newcomer takes the place of a replica whose worker is dead, and goes on from the state that it has left."""
        session = self._session
        session.row.enter(Phase.JOINING)
        session.needed()
        # An empty one too, but last: whose worker died before it had left a state, or is still to take it.
        self._take_slot(sorted(range(self._slots), key=lambda slot: self._locker(slot).empty))
        while (state := self._first_state()) is None:
            session.check_run()
            time.sleep(_AGAIN_S)
        self._run._keeping.restore(state)
        self._exchanges.begin()
        self._copy()
        session.row.enter(Phase.SCRIPT)

    def _first_state(self) -> Snapshot | None:
        """What this replica has left; or the others, if they have gone on without it. Nothing, if they are about to: its own is
        lost with its machine."""
        if self._copies is not None:
            self._copies.bring(self.slot, self._exchanges.attendance.drops)
        own, others = self._locker(self.slot), [self._locker(k) for k in range(self._slots) if k != self.slot]
        if self._exchanges.attendance.drops:
            there = [locker for locker in others if not locker.empty]
            ahead = [locker for locker in there if own.empty or locker.rounds > own.rounds]
            if ahead:
                rounds, state = max(ahead, key=lambda locker: locker.rounds).copied()
                theirs = Snapshot.read(state)
                if self.slot not in (theirs.tree["strategy"]["present"] or range(self._slots)):
                    return theirs
                if rounds > (0 if own.empty else own.rounds + 1):
                    return None
        return self._own_state()

    def _own_state(self) -> Snapshot:
        """One that died before it had left any began as all others did: from the start, or from the run's checkpoint."""
        while not (there := [slot for slot in (self.slot, *range(self._slots)) if not self._locker(slot).empty]):
            self._session.check_run()
            time.sleep(_POLL_S)
        locker = self._locker(there[0])
        if there[0] == self.slot:
            return Snapshot.read(locker.look())
        rounds, state = locker.copied()
        theirs = Snapshot.read(state)
        if self._session.resume_from:
            return self._run._keeping.begun_from(self._session.resume_from, theirs)
        assert not rounds, f"slot {self.slot} has left no state"
        return theirs

    def _locker(self, slot: int) -> Locker:
        return self._lockers.of(slot)

    def _keep(self) -> None:
        """The state of right now is what a newcomer would go on from."""
        if self._session.launched and not self._exchanges.is_behind:
            self._locker(self.slot).put(self._strategy.rounds, self._run._keeping.capture())
            self._kept_in = self._stepper.epoch
            self._copy()

    def _copy(self) -> None:
        if self._copies is not None:
            self._copies.offer(self.slot)

    # loops

    def _begin(self) -> None:
        """A loop does. The state that was left behind the one before would lead a newcomer to that one's end: all that only its
        body sets would not be there."""
        self.come_together()
        if self._over or self._kept_in != self._stepper.epoch:
            self._over = False
            self._keep()

    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        run, stepper = self._run, self._stepper
        refuse_two_at_once(stepper)
        self._begin()
        run._feeding.tell_if_over(feed, loader)
        if self._exchanges.attendance.drops and feed.steps is None:
            raise UsageError(
                f"{user_line()}: --on-death drop with an IterableDataset: nobody could read a lost replica's items again; make it "
                "map-style, or leave --on-death out"
            )
        epoch, self._feed, self._in_loop = stepper.epoch, feed, True
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
                share = None if self._exchanges.sits_out else batch.share(self.slot)
                stepper.split.data += time.perf_counter() - start
                refuse_two_at_once(stepper)
                self._begin_step(batch, start)
                if share is not None:  # else it has no sample of this batch, and sits the step out
                    yield share.value
                stepper.end()
                number += 1
                run._feeding.positions_at(loader, epoch, number)
                self._at_end = number == feed.steps
                self._ends = self._at_end and self._strategy.rhythm.meets_within(stepper.step, number)
                yield from self._for_others(self._receipts[-1])
                yield from self._at_boundary()
            yield from self._close()
            self._over = True
        except GeneratorExit:
            if stepper.abandon():
                run._feeding.positions_at(loader, epoch, number + 1)
            self._left = True
            raise
        finally:
            self._feed, self._in_loop, self._ends, self._at_end = None, False, False, False
            feed.stop()

    def over_steps(self, count: int) -> Iterator[int]:
        run, stepper = self._run, self._stepper
        self._begin()
        stepper.gaps.begin()
        last, self._in_loop = min(count, run.settings.steps or count), True
        try:
            for number in range(stepper.step, last):
                self._begin_step(None, time.perf_counter())
                if not self._exchanges.sits_out:
                    yield number
                stepper.end()
                self._at_end = number + 1 == last
                yield from self._for_others(self._receipts[-1])
                yield from self._at_boundary()
                if run.stopped:
                    break
            yield from self._close()
            self._over = True
        except GeneratorExit:
            stepper.abandon()
            self._left = True
            raise
        finally:
            self._in_loop = self._at_end = False

    def _begin_step(self, batch: Batch | None, since: float) -> None:
        stepper = self._stepper
        stepper.begin(batch, since)
        stepper.slot = stepper.mine[0]
        set_seed(mix(self._run.settings.seed, IN_SHARE, stepper.step, 0, stepper.slot), self._run.device)

    def _delivered(self, batch: Batch | None, tally: Tally | Loose) -> None:
        stepper = self._stepper
        loader, number = (OWN_DRAWS, stepper.leaves) if batch is None else (batch.loader, batch.number)
        tally = NO_TALLY if self._exchanges.sits_out else tally
        self._receipts.append(Receipt(stepper.step, stepper.epoch, loader, number, *tally))
        self._strategy.trained(tally.samples)

    # shares of a replica that the run has gone on without

    def _for_others(self, done: Receipt) -> Iterator[Any]:
        """What falls to this replica in a step that it has done, beside its own share."""
        for slot in taken_over(done.step, self.slot, self._slots, self._exchanges.attendance.deal):
            yield from self._stand_in(done, slot)

    def _make_up(self, before: Deal) -> Iterator[Any]:
        """The same in all steps of this round, once it is dealt anew."""
        done = {receipt.step: receipt for receipt in self._receipts}
        for step, slot in owed(done, self.slot, self._slots, before, self._exchanges.attendance.deal):
            yield from self._stand_in(done[step], slot)

    def _stand_in(self, done: Receipt, slot: int) -> Iterator[Any]:
        """Train the share that another slot had in a step that is done."""
        stepper, at = self._stepper, self._stepper.step
        batch = Batch(stepper, self._feed, done.loader, done.epoch, done.batch) if self._feed is not None else None
        share = batch.share(slot) if batch is not None else Share(done.step, NOTHING.ids)
        if share is None:
            return
        stepper.step, stepper.mine = done.step, [slot]
        try:
            self._begin_step(batch, time.perf_counter())
            with held(self._schedules):  # the body runs once more in a step that they have had
                yield share.value
        finally:  # also if the script leaves its loop here
            tally = stepper.tally_alone()
            self._receipts.append(Receipt(done.step, done.epoch, done.loader, done.batch, *tally))
            self._strategy.trained(tally.samples, steps=0)
            stepper.step, stepper.mine = at, [self.slot]
            stepper.end_turn(at)

    # the end of a round

    def _at_boundary(self) -> Iterator[Any]:
        """A step is over."""
        step, rhythm = self._stepper.step, self._strategy.rhythm
        if step == self._run.settings.steps:
            yield from self._close()
            return
        if rhythm.overlap and self._given is not None and rhythm.takes(step):
            yield from self._meet()
        fragment = rhythm.gives(step)
        if fragment is not None:
            everything = self._at_end and rhythm.fragments == 1 and self._strategy.meets_all  # once, and not in two
            self._given = self._strategy.give(None if everything else fragment)
            if rhythm.overlap:
                self._exchanges.start(self._given)
            else:
                yield from self._meet()

    def come_together(self) -> None:
        """The script has left a loop in the middle."""
        if self._left:
            self._left = False
            for _ in self._close():
                raise AssertionError("a share is to be trained, and there is no loop")

    def _close(self) -> Iterator[Any]:
        """Everybody's weights are the same behind this, whatever has been trained since they were last."""
        if self._given is not None:
            yield from self._meet()
        if self._strategy.apart:
            self._given = self._strategy.give(None)
            if self._strategy.rhythm.overlap:
                self._exchanges.start(self._given)  # nothing is hidden by that: there is memory for it already
            yield from self._meet()

    def collect(self) -> None:
        return

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

    # an exchange

    def _meet(self) -> Iterator[Any]:
        """What was given is exchanged, and what became of it comes in; behind the shares that were dealt anew meanwhile."""
        gift, self._given = self._given, None
        assert gift is not None
        deal = self._exchanges.attendance.deal
        while not self._exchanged(gift):
            self._strategy.withdraw(gift)
            if self._exchanges.sits_out:
                self._strategy.forget()
            yield from self._make_up(deal)
            deal, gift = self._exchanges.attendance.deal, self._strategy.give_again(gift)
        self._receipts = []
        self._run._keeping.at_boundary(self._ends, self._keep)
        self._session.at = f"the code after step {self._stepper.step}"

    def _exchanged(self, gift: Gift) -> bool:
        stepper = self._stepper
        start, waited = time.perf_counter(), self._run.terms.meeting.waited_s
        self._session.row.enter(Phase.REDUCE)
        self._session.at = f"the exchange after step {stepper.step}"
        # Outside a loop nobody could train a lost one's shares.
        least = self._run.settings.min_workers if self._in_loop else self._slots
        done = self._exchanges.exchange(gift, self._receipts, least)
        wait = max(0.0, self._run.terms.meeting.waited_s - waited)  # of a new term's meeting it begins at 0
        spent = time.perf_counter() - start
        stepper.split.wait += wait
        stepper.split.communication += spent - wait
        stepper.split.total += spent
        return done

    # checkpoints

    def states(self) -> list[bytes] | None:
        """Every replica's, in the order of slots, for main; all meet for that. Nothing: one of those who have just met has died
        before it had left its own. Who takes the place of one that the run goes on without begins as main."""
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
        states = []
        for slot in range(self._slots):
            # Who has left the run since it met the others has left its state, too.
            locker = self._locker(slot if slot in self._strategy.present else self.slot)
            if slot not in found and (locker.empty or locker.rounds != self._strategy.rounds):
                return None
            states.append(found.get(slot) or bytes(locker.look()))
        return states
