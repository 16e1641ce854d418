"""The state of the step in hand: where the run is, what the script may do now, where time went.

`Stepper` turns what a script does (asks for a batch, loops over shares, calls backward) into calls on
the strategy. It knows no models, no files and no terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from paceline.data.loader import Feed, Share
from paceline.data.order import mix
from paceline.data.pieces import NOTHING, Taken, cut, cut_ids, loose_tally, own_draw, tally
from paceline.data.random import IN_SHARE, OUTSIDE, set_seed
from paceline.data.receipts import NO_TALLY, Loose, Tally
from paceline.data.values import leading_size, map_tensors, place
from paceline.errors import MismatchError, UsageError
from paceline.loop.flat import Flat
from paceline.loop.pieces import Pieces
from paceline.loop.timing import Gaps, TimeSplit
from paceline.strategies.base import DIGEST, STOP, TALLY, TERM, Point, Stepwise
from paceline.tensors.following import Following
from paceline.tensors.peers import Peers, SharesWanted, TermEnded
from paceline.tensors.tree import Plan
from paceline.wires.board import Phase
from paceline.worker.session import Session, user_line


class Batch:
    """One global batch: a handle, from which this worker's shares are drawn in order.

    A script that unpacks it (`x, y = batch`) has a flat loop while its worker carries several slots;
    it is told which line to add.
    """

    __slots__ = ("_stepper", "epoch", "feed", "loaded", "loader", "number", "sizes")

    def __init__(self, stepper: Stepper, feed: Feed, loader: int, epoch: int, number: int) -> None:
        """`loader`: the feed's number in the run."""
        self._stepper, self.feed, self.loader, self.epoch, self.number = stepper, feed, loader, epoch, number
        self.sizes = feed.sizes(epoch, number)
        self.loaded: dict[int, Share | None] = {}
        """This worker's shares so far: a second reduce point in the step sees the same ones."""

    def share(self, slot: int) -> Share | None:
        """The slot's share on the device; None if it has no sample."""
        if slot not in self.loaded:
            share = self.feed.share(self.epoch, self.number, slot)
            self.loaded[slot] = None if share is None else Share(place(share.value, self._stepper.device), share.ids)
        return self.loaded[slot]

    def offered(self) -> Any:
        """What the script's loop variable gets where this worker carries one slot.

        A slot without a sample is lent a copy of another's, at weight 0: a flat loop must have something to do.
        """
        share = self.share(self._stepper.mine[0])
        if share is None:
            lent = map_tensors(self.feed.stand_in(self.epoch, self.number), torch.clone)
            return place(lent, self._stepper.device)
        return share.value

    def taken(self, slot: int) -> Taken:
        """What a share holds, if it was drawn."""
        share = self.loaded.get(slot)
        if share is None:
            return NOTHING
        return Taken(self.sizes[slot] if self.sizes is not None else leading_size(share.value), share.ids)

    def weight(self, slot: int, value: Any) -> float:
        """What this share counts for: 1 when all are alike, else its samples."""
        if self.sizes is None:
            return float(leading_size(value))
        if min(self.sizes) == max(self.sizes):
            return 1.0
        return float(self.sizes[slot])

    def _flat(self) -> Any:
        """The script takes the handle for its share: what it would have got if each worker had one slot."""
        if self._stepper.flat.begin_late():
            return self.offered()
        raise UsageError(
            f"{user_line()}: a flat loop with {self._stepper.slots} slots on {self._stepper.workers} workers: this "
            "worker has several shares of the batch. Add the inner loop `for x, y in run.slots():` around forward "
            f"and backward, or start with --slots {self._stepper.workers}"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._flat())

    def __getitem__(self, key: Any) -> Any:
        return self._flat()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._flat(), name)


class Stepper:
    """Drives a stepwise strategy through the reduce points of each step. Where workers do not meet in a step, there are only
    pieces, of the one share that a worker has."""

    def __init__(self, session: Session, peers: Peers, strategy: Stepwise | Pieces, scaled: bool) -> None:
        self._session = session
        self._pieces: Pieces | None = None
        if isinstance(strategy, Pieces):
            self._pieces = strategy
        else:
            self._strategy = strategy
        self.device, self.slots = session.device, session.settings.slots
        self._seed, self._row = session.settings.seed, session.row
        self._outside = mix(self._seed, OUTSIDE)
        self.flat = Flat(self, session, None if isinstance(strategy, Pieces) else strategy)
        self.meet(peers)
        self.alone = self._pieces is not None or (self.slots == 1 and not scaled)
        """One share at a time: nothing is folded, nobody is met."""
        self.step = self.epoch = self.samples = self.call = 0
        self.before = 0
        """Samples that the run had trained before this worker came in, or it was resumed."""
        self.batch: Batch | None = None
        self.in_hand: int | None = None
        """The step that was begun and has not ended; whoever leaves the loop in it leaves this as it is."""
        self.slot = -1
        """Whose share is in hand, likewise."""
        self.active = False
        """Between the start of a step and its end."""
        self.inside = False
        """Within the body of run.slots()."""
        self.stepped: set[int] = set()
        """The optimizers that have made a step since this one began, by id: they have used their gradients."""
        self._watched = False
        self.left_early: str | None = None
        self.summed = False
        """Whether shares' gradients are added instead of averaged."""
        self.split = TimeSplit()
        self.gaps = Gaps()
        self.redone = 0
        """Shares that this worker has computed for others who were lost."""
        self._taken: dict[int, Taken] = {}
        """Of each share that this worker has taken at the point in hand."""
        self.leaves = self.slots
        """Shares that the step's batch is cut into."""
        self._delivered: Tally | None = None
        """What all workers together took in this step, once they have met."""
        self._mark = 0.0
        self.stop_code: Callable[[], int] = lambda: 0
        self.settings_digest: Callable[[], int] = lambda: 0
        self.committed: Callable[[list[int]], None] = lambda codes: None
        """Called after each reduce point with every worker's stop code."""
        self.delivered: Callable[[Batch | None, Tally | Loose], None] = lambda batch, tally: None
        """Called at the end of each step with what it trained."""
        self.next_term: Callable[[], object]
        """A peer is gone: enter the next term, with those who remain."""
        self.agreed_term = 0
        """The newest term that every worker knew of at the last reduce point."""

    def meet(self, peers: Peers) -> None:
        """These are the workers now: which slots this one carries may have changed."""
        self._peers, self.workers = peers, peers.size
        self.follows = peers if isinstance(peers, Following) else None
        """A newcomer goes behind the others: what it computes is for its script's eyes only."""
        self.flat.meet()
        self.deal_slots()

    def deal_slots(self) -> None:
        """Where workers do not meet in a step, their loop knows which slot's share is in hand."""
        if self._pieces is None:
            self.mine = [0] if self.follows else self.flat.plan.leaves_of(self._peers.rank)

    # steps

    def begin(self, batch: Batch | None, since: float) -> None:
        """A step begins; its time counts from `since`, when its batch was asked for."""
        self.batch, self.call, self._taken, self.active, self._delivered = batch, 0, {}, True, None
        self.leaves, self.in_hand, self.slot = self.slots, self.step, -1
        self.stepped.clear()
        if not self.alone:
            self._strategy.begin_step()
        if self.alone or not self.flat.begin():
            self._seed_outside()
        self._row.enter(Phase.COMPUTE)
        self._mark = since

    def end(self) -> None:
        """The script is done with this step."""
        now = time.perf_counter()
        self.split.total += now - self._mark
        self.check_left_early()
        if self.call == 0 and not self.alone:
            self.no_reduce()
        if self._delivered is None and (code := self.stop_code()):
            self.committed([code])
        self._count_step(now)
        self._over()
        self.batch = self.in_hand = None

    def end_turn(self, steps: int) -> None:
        """The same for a worker that runs at its own pace, while the run has come so far."""
        now = time.perf_counter()
        self.split.total += now - self._mark
        self.check_left_early()
        self.gaps.step(now)
        self._row.progress(steps, self.epoch, self.samples)
        self.active, self.batch, self.in_hand = False, None, None

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step tells that gradients are used; and where nobody is met, that a batch was trained."""

        def note(*_: Any) -> None:
            self.stepped.add(number)

        number, self._watched = id(optimizer), True
        optimizer.register_step_post_hook(note)

    def _over(self) -> None:
        self.active = False
        if not self.alone:
            self.flat.end()

    def _count_step(self, now: float) -> None:
        delivered = self._delivered or self.tally_alone()
        self.samples += delivered.samples
        self.delivered(self.batch, delivered)
        self.step += 1
        self.gaps.step(now)
        self._row.progress(self.step, self.epoch, self.samples)

    def tally_alone(self) -> Tally | Loose:
        """What was trained where nobody was met: this worker's share is the batch."""
        if self._taken:  # in pieces
            return tally(self._taken.values())
        slot = self.mine[0]
        return loose_tally(own_draw(slot) if self.batch is None else self.batch.taken(slot))

    def abandon(self) -> bool:
        """The script left the loop in the middle of a step; whether that step was trained."""
        done = self.call > 0 or (
            self.alone and (bool(self.stepped) or not self._watched)
        )  # else it has only looked at a batch
        trained = self.active and not self.inside and self.left_early is None and done
        if trained:
            self._count_step(time.perf_counter())
        self._over()
        return trained

    def no_reduce(self) -> NoReturn:
        if not self.flat.allowed:
            raise UsageError(
                f"step {self.step} ended without run.slots(): with {self.slots} slots on {self.workers} workers, add "
                "`for x, y in run.slots():` around forward and backward"
            )
        raise UsageError(
            f"step {self.step} ended and no gradient of a prepared model was computed: was the model that you "
            "train given to run.prepare()?"
        )

    def check_left_early(self) -> None:
        if self.left_early is not None:
            where, self.left_early = self.left_early, None
            raise UsageError(
                f"{where}: the inner loop over run.slots() was left early, so shares of the batch were not "
                "trained; let it run to its end"
            )

    # shares

    def shares(self, count: int | None) -> Iterator[Any]:
        """run.slots(): this worker's shares; the reduce point is behind the last one."""
        if not self.active:
            raise UsageError(
                f"{user_line()}: run.slots() outside a step. Loop over a loader that was given to run.prepare(), inside "
                "`for epoch in run.epochs(n):` (or over `run.steps(n)`)"
            )
        self.check_left_early()
        caller = sys._getframe(1)
        line, leaves = caller.f_lineno, count or self.slots
        times = self._times_finer(leaves)
        if self._delivered is None:
            self.leaves = leaves
        self.inside = True
        try:
            if self._pieces is not None and leaves > self.slots:
                yield from self._in_pieces(times, self._pieces)
            elif self.alone and leaves in (1, self.slots):
                # The only share: its gradient is where autograd leaves it, and nobody is met.
                slot = self.mine[0]
                share = self.batch.share(slot) if self.batch is not None else Share(slot, NOTHING.ids)
                if share is not None:
                    self.slot, begun = slot, time.perf_counter()
                    yield share.value
                    self._linger(begun)
                    self.slot = -1
                self.call += 1
                self.agreed_term = self._session.next_term
            else:
                yield from self._reduced(leaves, times)
        except GeneratorExit:
            self.left_early = f"{os.path.basename(caller.f_code.co_filename)}:{line}"
            raise
        finally:
            self.inside = False

    def _in_pieces(self, times: int, pieces: Pieces) -> Iterator[Any]:
        """The one share in so many pieces, whose gradients add up here."""
        first = self.mine[0] * times
        for leaf in range(first, first + times):
            share, weight = self._draw(leaf, times)
            set_seed(mix(self._seed, IN_SHARE, self.step, 0, leaf), self.device)
            if weight:
                begun = time.perf_counter()
                yield share
                self._linger(begun)
                pieces.weigh(weight)
                pieces.fold()
        pieces.join()
        self.call += 1

    def _reduced(self, leaves: int, times: int) -> Iterator[Any]:
        """This worker's shares of a point, whose gradients are folded; the reduce is behind the last one."""
        point = Point(self.step, self.call, leaves)
        self._session.at = point.words
        plan, members = self._open(point)
        self._taken = {}
        kept = len(plan.parts(self._peers.rank))
        # A script may use what it has computed for a share, so one who follows is shown one too.
        due = [0] if self.follows else plan.leaves_of(self._peers.rank)
        while True:
            for leaf in due:
                if self._strategy.begin_share(leaf):
                    yield from self._share(leaf, times, only=leaves == 1)
            try:
                self.commit(point)
                return
            except SharesWanted as wanted:
                due = wanted.leaves
            except TermEnded:
                # What the point's first members have computed stands; the lost ones' shares come here too.
                self.next_term()
                rest = self._passed_on(plan, members)
                due = self._strategy.carry_on(point, rest, kept)
                self.redone += len(due)
                mine = set(rest.leaves_of(self._peers.rank)) - set(due)
                self._taken = {leaf: taken for leaf, taken in self._taken.items() if leaf in mine}

    def _open(self, point: Point) -> tuple[Plan, tuple[int, ...]]:
        """Begin a point: who takes which share, and who they are."""
        while True:
            try:
                leaves = point.leaves
                plan = self.follows.plan(leaves) if self.follows else Plan.of(leaves, self._peers.size)
                self._strategy.open(point, plan, flat=False)
                return plan, self._session.view.members
            except TermEnded:
                self.next_term()

    def _passed_on(self, plan: Plan, members: tuple[int, ...]) -> Plan:
        if self.follows is not None:
            return self.follows.plan(plan.leaves)
        return plan.passed_on(members, self._session.view.members)

    def _times_finer(self, leaves: int) -> int:
        """run.slots(k) over a loader cuts each slot's share into k / slots pieces."""
        if self.batch is None and self._pieces is None:
            return 1
        if leaves % self.slots:
            raise UsageError(f"{user_line()}: run.slots({leaves}) must be a multiple of the {self.slots} slots here")
        return leaves // self.slots

    def _share(self, leaf: int, times: int, only: bool) -> Iterator[Any]:
        start, self.slot = time.perf_counter(), leaf // times
        share, weight = self._draw(leaf, times)
        self.split.data += time.perf_counter() - start
        if weight and not only:  # an only share goes on with the numbers of the code around it
            set_seed(mix(self._seed, IN_SHARE, self.step, self.call, leaf), self.device)
        self._strategy.weigh(weight)
        begun = time.perf_counter()
        if weight:
            yield share
        self._linger(begun)
        start = time.perf_counter()
        self._strategy.drop() if self.follows else self._strategy.fold(leaf)
        self.slot = -1
        self.split.communication += time.perf_counter() - start

    def _linger(self, begun: float) -> None:
        """Take longer over a share that was begun then: a fault on purpose."""
        slower = self._session.slower
        if slower > 1.0:
            time.sleep((slower - 1.0) * (time.perf_counter() - begun))

    def _draw(self, leaf: int, times: int) -> tuple[Any, float]:
        """A share and its weight; the weight is 0 where there is no sample."""
        batch = self.batch
        if batch is None:
            self._taken[leaf] = own_draw(leaf)
            return leaf, 1.0
        slot, piece = divmod(leaf, times)
        share = batch.share(slot)
        if share is None:
            return None, 0.0
        if times == 1:
            self._taken[leaf] = batch.taken(slot)
            return share.value, batch.weight(slot, share.value)
        part = place(cut(share.value, piece, times), self.device)
        self._taken[leaf] = Taken(leading_size(part), cut_ids(share, piece, times))
        return part, float(leading_size(part))

    def tally_of(self, leaf: int) -> Tally:
        """What was taken for one share of the point in hand."""
        return tally([self._taken[leaf]]) if leaf in self._taken else NO_TALLY

    def take(self, slot: int) -> None:
        """A flat loop has this slot's share, and no other."""
        self._taken = {slot: self.batch.taken(slot) if self.batch is not None else own_draw(slot)}

    def weigh(self, weight: float) -> None:
        if not (self.inside or (self.active and self.flat.allowed)):
            raise UsageError(f"{user_line()}: run.weight() belongs inside the loop over run.slots()")
        (self._pieces or self._strategy).weigh(float(weight))

    # meeting

    def commit(self, point: Point) -> None:
        """Meet the others at this point, with what was taken for it."""
        start, waited = time.perf_counter(), self._peers.waited_s
        self._row.enter(Phase.REDUCE)
        # A share counts once, however often the step shows it.
        taken = tally(self._taken.values()) if self._delivered is None else NO_TALLY
        lanes = [self.stop_code(), self.settings_digest(), self._session.next_term, *taken]
        rows = self._strategy.commit(point, mix(1, point.step, point.call, point.leaves), lanes)
        self._compare(rows[:, DIGEST].tolist())
        self.agreed_term = int(rows[:, TERM].min())
        self.call += 1
        if self._delivered is None:
            self._delivered = Tally.total(rows[:, TALLY])
        self._seed_outside()
        self.committed(rows[:, STOP].tolist())
        self._row.enter(Phase.COMPUTE)
        self._session.at = f"the code after step {point.step}'s gradients"
        wait = self._peers.waited_s - waited
        self.split.wait += wait
        self.split.communication += time.perf_counter() - start - wait

    def _compare(self, digests: list[int]) -> None:
        if any(digest != digests[0] for digest in digests):
            members = self._session.view.members
            odd = [members[rank] for rank, digest in enumerate(digests) if digest != digests[0]]
            raise MismatchError(
                f"at step {self.step} the optimizer settings (learning rate, momentum, …) of worker "
                f"{', '.join(map(str, odd))} differ from worker {members[0]}'s: change them the same way on every worker, and give schedulers to "
                "run.prepare(), so that a worker that joins or resumes has them as they are"
            )

    def _seed_outside(self) -> None:
        """Code around the shares draws the same numbers on every worker."""
        set_seed(mix(self._outside + (self.step << 16) + self.call), self.device)


def line_of_close() -> str:
    """The line that abandoned the generator which is being closed now."""
    frame = sys._getframe(1).f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "the end of the script"
