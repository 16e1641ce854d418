"""The training loop of workers that run at their own pace: one micro-batch after the other, until a stretch is over.

A stretch is one loop over a loader, or over run.steps(). Within it workers meet nobody; at its end they all come together,
and newcomers that have trained in it are let in.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.data.loader import Feed
from paceline.data.order import mix
from paceline.data.pieces import own_draw, tally
from paceline.data.random import IN_SHARE, set_seed
from paceline.data.receipts import OWN_DRAWS, Receipt
from paceline.errors import PacelineError, UsageError
from paceline.loop import checks
from paceline.loop.schedules import Schedule
from paceline.loop.steps import Batch
from paceline.servers.register import Delivered
from paceline.tensors.snapshot import Snapshot
from paceline.wires.board import Phase
from paceline.worker.session import user_line

if TYPE_CHECKING:
    from paceline.loop.steps import Stepper
    from paceline.run import Run
    from paceline.servers.messages import Turned
    from paceline.servers.register import Receipt as Whole
    from paceline.servers.register import Register
    from paceline.strategies.free import FreeRunning
    from paceline.strategies.registered import Registered


class Turns(ABC):
    """What all of them have in common; which micro-batches a loop gives, and what it does with them, is a kind's own."""

    def __init__(self, run: Run, strategy: Registered, stepper: Stepper) -> None:
        self._run, self._registered, self._stepper = run, strategy, stepper
        self._session, self._slots = run._session, run.settings.slots
        self._steps, self._written = 0, 0
        """Whole steps of the run, and those whose receipts this worker has seen to."""
        self._left = False
        self._delivered: Delivered | None = None
        """What this worker has done last."""
        schedulers = [item for item in run._replica.schedulers if isinstance(item, LRScheduler)]
        self._schedules = [self._schedule(item) for item in schedulers]
        if self._session.workers > 1:
            self._notice(checks.each_its_own(run.settings.strategy, run._registered))

    def _notice(self, words: str) -> None:
        if words and self._run.is_main:
            self._session.notice(words)

    def _schedule(self, scheduler: LRScheduler) -> Schedule:
        return Schedule(scheduler)

    @property
    def copied_bytes(self) -> int:
        return 0

    def begin(self) -> None:
        return

    # newcomers

    def enter(self) -> None:
        """A newcomer begins in the middle of a stretch, and trains in it before it is let in at its end."""
        self._session.row.enter(Phase.JOINING)
        self._session.needed()
        self._run._keeping.restore(Snapshot.read(self._registered.enter()))

    # loops

    @abstractmethod
    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        """The loader's micro-batches that fall to this worker."""

    @abstractmethod
    def over_steps(self, count: int) -> Iterator[int]:
        """For scripts that draw their own batches."""

    def _refuse_stream(self, feed: Feed) -> None:
        if feed.steps is None:
            raise UsageError(
                f"{user_line()}: --strategy {self._run.settings.strategy} takes a data set's samples by number, and an "
                "IterableDataset has none; make it map-style, or use --strategy ps"
            )

    def _numbers(self, total: int, want: int, loader: int, last: int = 0) -> Generator[tuple[int, int, list[int]]]:
        """Micro-batches, the run's step with which the stretch begins, and those that have come into hand since the last."""
        run, stepper = self._run, self._stepper
        self.come_together()
        begun = self._registered.begin_stretch(
            total, stepper.epoch, loader, lambda: run._keeping.capture().packed(), last
        )
        self._first, self._loader = begun.first, loader
        self._written = max(self._written, run._keeping.ledger.head.first)
        stepper.gaps.begin()
        self._session.left, run.terms.catching_up = None, False
        known: set[int] = set()
        delivered: list[Delivered] = []
        try:
            while True:
                self._session.row.enter(Phase.DATA)
                start = time.perf_counter()
                turned = self._turn(want, delivered)
                stepper.split.wait += time.perf_counter() - start
                stepper.split.total += time.perf_counter() - start
                if not turned.numbers:
                    break
                fresh = [number for number in turned.numbers if number not in known]
                known.update(fresh)
                self._count = turned.count
                yield turned.numbers[0], begun.first, fresh
                delivered = [self._delivered] if self._delivered is not None else []
                self._boundary()
        except GeneratorExit:
            self._leave()
            raise
        self._over(turned)

    def _boundary(self) -> None:
        """A micro-batch is done, the next has not begun."""
        self._stepper.agreed_term = (
            0  # who left here would leave what it has in hand, and others who meet it at the end
        )
        self._run._keeping.at_boundary()

    def _turn(self, want: int, delivered: list[Delivered], leaves: bool = False) -> Turned:
        """What comes next, and how far the run has come; who was main when it asked has got receipts to write."""
        run, main = self._run, self._run.is_main
        code = run._stopping.code(self._steps, run.metrics)
        written = self._in_file if main else -1
        turned = self._registered.turn(want, delivered, code, written, leaves, self._scheduled)
        self._steps, self._stepper.samples = turned.steps, turned.samples
        if main:
            self._write(turned.receipts, turned.steps)
        return turned

    @property
    def _scheduled(self) -> int:
        """Which schedulers are stepped within the loop, a bit each."""
        return sum(1 << number for number, schedule in enumerate(self._schedules) if schedule.within)

    def settle(self, register: Register) -> None:
        """For a checkpoint: the run is where the register says, and the receipts up to there are written."""
        self._stepper.step, self._stepper.samples = register.steps, register.samples
        self._write(register.receipts, register.steps)

    def ends(self, register: Register) -> bool:
        """Whether the run stands at the end of a loop that the script has not left yet, and will enter again."""
        return False

    def _write(self, receipts: list[Whole], steps: int) -> None:
        for each in receipts:
            if each.step >= self._written:
                place = each.step, each.epoch, each.loader, each.batch
                if self._run._keeping.ledger.add(Receipt(*place, each.samples, each.ids, each.digest)):
                    self._run._keeping.ledger.write()
        self._written = max(self._written, steps)

    @property
    def _in_file(self) -> int:
        """Receipts of so many steps are written; the next main has to write the others."""
        waiting = self._run._keeping.ledger.recent
        return waiting[0].step if waiting else self._written

    def collect(self) -> None:
        """Main's, between stretches: receipts that nobody was main for."""
        self._turn(0, [], leaves=True)

    def close(self) -> None:
        return

    @abstractmethod
    def _leave(self) -> None:
        """The script has left the loop: others do the rest."""

    def come_together(self) -> None:
        """The script has left a stretch before its end: wait until the others have come to it, or have left it too."""
        if self._left:
            self._left = False
            self._over(self._turn(0, []))

    def _rest(self, steps: int) -> None:
        self._stepper.step = steps
        for schedule in self._schedules:
            schedule.rest(steps)

    def _over(self, turned: Turned) -> None:
        run, stepper = self._run, self._stepper
        self._registered.end_stretch(turned)
        self._rest(turned.steps)
        run._feeding.positions_at(self._loader, stepper.epoch, turned.steps - self._first)
        if turned.stop:
            run._stopping.settle_one(turned.stop, turned.stopper, turned.steps)
        if self._session.joining:
            run.terms.join(run._keeping)
            run.terms.catching_up = False
            turned.trainers = self._registered.trainers()  # somebody may have left before this one was let in
        run.terms.reunite(turned.trainers, self._registered.parted, run._keeping)
        if not run.stopped and (code := run._stopping.code(turned.steps, {})):
            run._stopping.settle_one(code, self._session.worker, turned.steps)
        if run.stopped:
            run._keeping.at_stop()
        if not turned.stop:
            self._registered.next_stretch()


class FreeTurns(Turns):
    """Of workers that push the gradients of each micro-batch."""

    def __init__(self, run: Run, strategy: FreeRunning, stepper: Stepper) -> None:
        super().__init__(run, strategy, stepper)
        self._strategy = strategy

    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        """The loader's micro-batches that fall to this worker."""
        self._refuse_stream(feed)
        total, last = (feed.steps or 0) * self._slots, self._run.settings.steps
        with closing(self._numbers(total, 1 + feed.depth, loader, last)) as numbers:
            upcoming = _Upcoming(self._slots)
            try:
                for number, first, fresh in numbers:
                    upcoming.extend(fresh)
                    if not upcoming.followed:
                        upcoming.followed = True
                        feed.follow(self._stepper.epoch, upcoming)
                    yield from self._drawn(feed, number, first)
            finally:
                feed.stop()

    def ends(self, register: Register) -> bool:
        feed = self._run._feeding.feeds[self._loader] if self._loader >= 0 else None
        more = self._stepper.epoch + 1 < self._run._epochs_asked
        return feed is not None and more and 1 < register.steps - self._first == feed.steps

    def _drawn(self, feed: Feed, number: int, first: int) -> Iterator[Any]:
        stepper = self._stepper
        step, slot = divmod(number, self._slots)
        start = time.perf_counter()
        batch = Batch(stepper, feed, self._loader, stepper.epoch, step)
        stepper.mine, stepper.slot = [slot], slot
        share = batch.share(slot)
        stepper.split.data += time.perf_counter() - start
        taken = batch.taken(slot)
        self._delivered = Delivered(number, *tally([taken]))
        if share is not None:
            part = taken.samples / sum(batch.sizes) if batch.sizes is not None else 1 / self._slots
            yield from self._micro_batch(number, first + step, part, batch, share.value, start)

    def over_steps(self, count: int) -> Iterator[int]:
        """For scripts that draw their own batches."""
        last = min(count, self._run.settings.steps or count)
        with closing(self._numbers(count * self._slots, 1, OWN_DRAWS, last)) as numbers:
            for number, first, _ in numbers:
                step, slot = divmod(number, self._slots)
                self._stepper.mine = [slot]
                self._delivered = Delivered(number, *tally([own_draw(slot)]))
                yield from self._micro_batch(
                    number, first + step, 1 / self._slots, None, first + step, time.perf_counter()
                )

    def _micro_batch(
        self, number: int, step: int, part: float, batch: Batch | None, value: Any, since: float
    ) -> Iterator[Any]:
        stepper = self._stepper
        stepper.step = step
        self._run._session.row.enter(Phase.REDUCE)
        for schedule in self._schedules:
            schedule.at(step)
        self._strategy.take(number, part, self._count)
        stepper.begin(batch, since)
        set_seed(mix(self._run.settings.seed, IN_SHARE, step, 0, number % self._slots), self._run.device)
        yield value
        stepper.split.communication += self._strategy.spent_s()
        stepper.end_turn(self._steps)
        self._refuse_unpushed()

    def _refuse_unpushed(self) -> None:
        """What is not pushed with its micro-batch would be lost, or trained twice, with this worker."""
        if self._strategy.has_pushed:
            return
        if any(param.grad is not None and bool(param.grad.any()) for param in self._run._replica.params):
            raise UsageError(
                f"a batch has ended with gradients and without optimizer.step(): with --strategy "
                f"{self._run.settings.strategy} each worker's batch is pushed by itself; step after every batch, or have "
                "fewer slots instead of accumulating"
            )

    def _leave(self) -> None:
        stepper = self._stepper
        delivered = [self._delivered] if self._strategy.has_pushed and self._delivered is not None else []
        if stepper.active:
            stepper.end_turn(self._steps)
        with suppress(PacelineError):  # it may be on its way out because the run ends
            self._strategy.turn(0, delivered, leaves=True)
        self._left = True


class _Upcoming:
    """Where the loader looks for what to fetch next, as it reads ahead: what is in hand, in order."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.followed = False
        self._places: deque[tuple[int, int]] = deque()

    def extend(self, numbers: list[int]) -> None:
        self._places.extend(divmod(number, self._slots) for number in numbers)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self._places:
            yield self._places.popleft()
