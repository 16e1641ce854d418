"""From the loaders a script has prepared to the batches of its training loop."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.copies import strided
from paceline.data.loader import Feed, adopt, adopted, build_feed
from paceline.data.order import mix
from paceline.data.partition import Split, skew
from paceline.data.values import place
from paceline.errors import UsageError
from paceline.loop.course import STEPS, Course, era_of_epoch, era_of_steps
from paceline.loop.loops import Loop
from paceline.loop.orders import Orders
from paceline.loop.steps import Batch, Stepper, line_of_close
from paceline.loop.stopping import Stopping
from paceline.loop.unwinding import Running, came_through, running_now
from paceline.strategies.base import InRounds, Strategy
from paceline.wires.board import Phase
from paceline.worker.session import Session, user_line
from paceline.worker.terms import Terms

_LOOK = 9  # keeps the seeds of looks apart from those of steps, items and collation


class Feeding:
    """The prepared loaders, and how far this epoch has come in each."""

    def __init__(self, session: Session, terms: Terms, stopping: Stopping, at_boundary: Callable[[bool], None]) -> None:
        self._session, self._terms, self._stopping, self._at_boundary = session, terms, stopping, at_boundary
        self.strategy: Strategy
        self.feeds: list[Feed] = []
        self._positions: dict[int, tuple[int, int]] = {}
        """By a feed's number in the list: the epoch, and the batches of it that are trained."""
        self._orders = Orders(session, terms)
        self._loaders: list[DataLoader[Any]] = []
        self._passed: dict[int, int] = {}
        """By a feed's number: the epoch of which this process has gone through its batches."""
        self._course = Course()
        self._under_way: Callable[[], Any] = lambda: None
        """The last loop's iterator, if there still is one."""
        self._stepper: Stepper | None = None
        self.loop: Loop | None = None
        """The strategy's own, where workers do not meet in every step."""
        self._closed: Running = []
        """What was running when the training loop was left before its end."""

    @property
    def _split(self) -> Split:
        settings = self._session.settings
        return Split.parse(settings.split, settings.slots)

    # what is prepared

    def add(self, loader: DataLoader[Any]) -> None:
        """From now on, iterating this loader gives the run's batches."""
        if adopted(loader):
            raise UsageError(f"{user_line()}: this loader was given to prepare() already")
        settings, number = self._session.settings, len(self.feeds)
        feed = self._feed(loader, mix(settings.seed, number))
        self.feeds.append(feed)
        self._loaders.append(loader)
        if self._session.is_main and number == 0:
            words, sizes = (
                self._batch_words(feed),
                list(feed.dealing.clients) or (feed.sizes(0, 0) if feed.steps else None),
            )
            self._session.notice(words)
            self._session.folder.event("data", words, steps=feed.steps, skew=skew(sizes) if sizes else None)
        adopt(loader, lambda: self._begun(number), lambda: _length(feed))

    def _begun(self, number: int) -> Iterator[Any]:
        batches = self._batches(number)
        self._under_way = weakref.ref(batches)
        return batches

    def leave_loops(self) -> None:
        """The script is at an epoch's end: a loop over an iterator that it has a name for has been left, though nothing tells."""
        if (batches := self._under_way()) is not None:
            batches.close()

    def _feed(self, loader: DataLoader[Any], seed: int) -> Feed:
        if isinstance(self.strategy, InRounds):
            return self.strategy.feed(loader, seed)
        return build_feed(loader, self._session.settings.slots, self._split, seed)

    def _batch_words(self, feed: Feed) -> str:
        slots = self._session.settings.slots
        if feed.dealing.clients:
            return feed.dealing.words
        if feed.batch is None:
            return f"the loader's own batches, over {slots} slot{'s' * (slots != 1)} a step"
        sizes = sorted({last - first for first, last in self._split.cut(feed.batch, slots)}, reverse=True)
        return f"batch {feed.batch} = {slots} slot{'s' * (slots != 1)} × {' or '.join(map(str, sizes))}"

    def words(self) -> list[str]:
        """The first loader's batches and steps, for --dry-run."""
        if not self.feeds:
            return []
        feed = self.feeds[0]
        return [self._batch_words(feed), f"{feed.steps or 'an unknown number of'} steps an epoch"]

    def total_steps(self, epochs: int) -> int:
        """Steps of a run of so many epochs; 0 if nobody can know."""
        per_epoch = self.feeds[0].steps if self.feeds else None
        total = per_epoch * epochs if per_epoch else 0
        limit = self._session.settings.steps
        return min(total, limit) if total and limit else total or limit

    # where the run is

    @property
    def training(self) -> bool:
        """Whether the script is in its training loop; batches drawn elsewhere are not counted."""
        return self._stepper is not None

    def begin_loop(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def end_loop(self) -> None:
        self._stepper = None
        self._closed = running_now() if isinstance(sys.exception(), GeneratorExit) else []

    def left_by(self, trace: TracebackType | None) -> bool:
        """Whether this exception has ended the training loop, rather than coming up before or behind it."""
        return self.training or came_through(trace, self._closed)

    @property
    def at_end(self) -> bool:
        """Whether every loader that this epoch has used is at its end."""
        return all(number == self.feeds[feed].steps for feed, (_, number) in self._positions.items())

    def at_loops_end(self, epoch: int) -> bool:
        """The same where this epoch has used one."""
        return self.begun(epoch, epoch + 1) and self.at_end

    def position(self, feed: int, epoch: int) -> int:
        """Batches of this loader that are trained in the epoch."""
        known, number = self._positions.get(feed, (epoch, 0))
        return number if known == epoch else 0

    def begun(self, first: int, last: int) -> bool:
        """Whether the position in a loader is in one of these epochs."""
        return any(first <= epoch < last for epoch, _ in self._positions.values())

    def positions_at(self, feed: int, epoch: int, number: int) -> None:
        """So many batches of this loader are trained in the epoch."""
        if feed >= 0:
            self._positions[feed] = epoch, number

    def epoch_done(self) -> None:
        self._positions = {}

    def capture(self) -> list[Any]:
        """The position in each loader, and what is known of their samplers' orders."""
        positions = [self._positions.get(number) for number in range(len(self.feeds))]
        return [positions, self._orders.capture(), self._course.capture()]

    def restore(self, state: list[Any]) -> None:
        positions, orders, course = state
        self._course.restore(course)
        for number, (_, position) in enumerate(zip(self.feeds, positions, strict=True)):
            if position is not None:
                self._positions[number] = position
        self._orders.restore(orders)

    # batches

    def _batches(self, feed_number: int) -> Iterator[Any]:
        """What `for batch in loader` runs."""
        feed, stepper = self.feeds[feed_number], self._stepper
        if stepper is None:
            yield from self._peek(feed)
            return
        if self._passed.get(feed_number) == stepper.epoch and not feed.dealing.clients:
            yield from self._look(feed_number, stepper.epoch)
            return
        # A run that stops passes through the rest of its script without a batch: none of that is where it goes on.
        if not self._stopping.reason and self._course.is_behind(feed_number, era_of_epoch(stepper.epoch)):
            if self.position(feed_number, stepper.epoch) == feed.steps:
                self._passed[feed_number] = stepper.epoch
            return
        if self.loop is None:
            yield from self._trained(feed, feed_number, stepper)
        else:
            yield from self._looped(self.loop, feed, feed_number, stepper)
        self._passed[feed_number] = stepper.epoch
        if not self._stopping.reason:
            self._course.over()

    def over_steps(self, steps: Callable[[], Iterator[int]], limit: int, asked: int) -> Iterator[int]:
        """What `for step in run.steps(limit)` runs, behind so many epochs that were asked for."""
        if not self._stopping.reason and self._course.is_behind(STEPS, era_of_steps(asked), limit):
            return
        if self.loop is not None:
            self.loop.come_together()
        self._course.begin()
        try:
            yield from steps()
        except GeneratorExit:
            self._course.over()
            raise
        if not self._stopping.reason:
            self._course.over()

    def _looped(self, loop: Loop, feed: Feed, feed_number: int, stepper: Stepper) -> Iterator[Any]:
        """The strategy's own loop."""
        loop.come_together()
        self._orders.check(feed, feed_number, stepper.epoch)
        self._course.begin()
        try:
            yield from loop.over_loader(feed, feed_number)
        except GeneratorExit:
            self._session.left = line_of_close()
            self._course.over()
            raise

    def _trained(self, feed: Feed, feed_number: int, stepper: Stepper) -> Iterator[Any]:
        """What is left of the epoch."""
        epoch = stepper.epoch
        number = self.position(feed_number, epoch)
        self._course.begin()
        self.tell_if_over(feed, feed_number)
        aimed, first = None, number
        stepper.gaps.begin()
        self._session.left = None
        self._terms.catching_up = False
        self._orders.check(feed, feed_number, epoch)
        try:
            while not self._stopping.reason and ((steps := feed.steps) is None or number < steps):
                stepper.flat.fill()
                if stepper.mine != aimed:
                    aimed = stepper.mine
                    feed.start(epoch, number, aimed)
                drawn = self._draw(stepper, feed_number, epoch, number)
                if drawn is None:
                    if 0 < number == first:
                        self._tell_over(epoch)
                    break
                yield drawn
                stepper.end()
                number += 1
                self._positions[feed_number] = (epoch, number)
                self._at_boundary(1 < number == feed.steps)  # in a loop of one step there is no other place
        except GeneratorExit:
            self._session.left = line_of_close()
            self._course.over()
            if stepper.abandon():
                self._positions[feed_number] = (epoch, number + 1)
                if number + 1 == feed.steps:
                    self._passed[feed_number] = epoch
            raise
        finally:
            feed.stop()

    def tell_if_over(self, feed: Feed, feed_number: int) -> None:
        """Whoever goes on from another's state may come to a loop at its end."""
        assert self._stepper is not None
        epoch = self._stepper.epoch
        if feed.steps and self.position(feed_number, epoch) == feed.steps:
            self._tell_over(epoch)

    def _tell_over(self, epoch: int) -> None:
        self._session.notice(
            f"epoch {epoch + 1} is entered at its end: nothing is left of the loop over the loader, and the code behind it runs "
            "now. A name that only that loop sets is not there: set it before the loop"
        )

    def _look(self, feed_number: int, epoch: int) -> Iterator[Any]:
        """The epoch is trained, and the script goes through the loader once more, for an accuracy say: all that the loader
        has, in whole batches, on each worker. No step, and nobody is met."""
        key = mix(self._session.settings.seed, epoch, _LOOK)
        for _, batch in strided(self._loaders[feed_number], 0, 1, key):
            yield place(batch, self._session.device)

    def _draw(self, stepper: Stepper, loader: int, epoch: int, number: int) -> Any:
        """Begin a step with the loader's next batch: what the script's loop variable gets; None at the end of a stream."""
        start = time.perf_counter()
        self._session.row.enter(Phase.DATA)
        batch = Batch(stepper, self.feeds[loader], loader, epoch, number)
        if batch.sizes is not None and not any(batch.sizes) and batch.feed.steps is None:
            return None
        refuse_two_at_once(stepper)
        stepper.slot = stepper.mine[0]
        offered = batch.offered() if stepper.flat.allowed else batch
        stepper.split.data += time.perf_counter() - start
        stepper.begin(batch, start)
        return offered

    def _peek(self, feed: Feed) -> Iterator[Any]:
        """Batches outside the training loop: looked at, not counted."""
        slots = range(self._session.settings.slots)
        feed.start(0, 0, slots)
        number = 0
        try:
            while feed.steps is None or number < feed.steps:
                shares = [feed.share(0, number, slot) for slot in slots]
                if shares[0] is None:
                    break
                yield shares[0].value
                number += 1
        finally:
            feed.stop()


def refuse_two_at_once(stepper: Stepper) -> None:
    if stepper.active:
        raise UsageError(
            f"{user_line()}: two loops over prepared loaders at once (zip(), or one inside the other): a step has "
            "one loader; leave the other out of prepare()"
        )


def _length(feed: Feed) -> int:
    if feed.steps is None:
        raise TypeError("the length of a stream is not known")
    return feed.steps
