"""The training loop of workers that train clients: one round is one loop over the loader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.data.loader import Feed
from paceline.data.order import mix
from paceline.data.pieces import tally
from paceline.data.random import IN_SHARE, set_seed
from paceline.errors import PacelineError, UsageError
from paceline.loop import checks
from paceline.loop.schedules import RoundSchedule
from paceline.loop.steps import Batch
from paceline.loop.turns import Turns
from paceline.servers.register import Delivered
from paceline.wires.board import Phase
from paceline.worker.session import user_line

if TYPE_CHECKING:
    from paceline.loop.steps import Stepper
    from paceline.run import Run
    from paceline.servers.messages import Turned
    from paceline.strategies.federated import Federated


class ClientTurns(Turns):
    def __init__(self, run: Run, strategy: Federated, stepper: Stepper) -> None:
        if run.settings.epochs and strategy.rounds:
            raise UsageError(
                f"--epochs {run.settings.epochs} with --strategy {run.settings.strategy}: rounds says how often the loop over "
                "run.epochs() is gone through; leave one of them out"
            )
        super().__init__(run, strategy, stepper)
        self._strategy = strategy
        rounds = strategy.rounds or run.settings.epochs or 0
        self._notice(checks.planned_by_rounds(run.settings.strategy, rounds, run._replica.schedulers))

    def _schedule(self, scheduler: LRScheduler) -> RoundSchedule:
        return RoundSchedule(scheduler)

    def over_loader(self, feed: Feed, loader: int) -> Iterator[Any]:
        with closing(self._numbers(self._strategy.total(loader), 1, loader)) as leaves:
            try:
                for leaf, number, _ in leaves:
                    client = self._strategy.roster(loader, number).present[leaf]
                    yield from self._client(feed, loader, number, leaf, client)
            finally:
                feed.stop()

    def over_steps(self, count: int) -> Iterator[int]:
        raise UsageError(
            f"{user_line()}: --strategy {self._run.settings.strategy} trains clients on their data, and run.steps() has none; "
            "loop over a prepared loader inside `for epoch in run.epochs(n):`"
        )

    def _client(self, feed: Feed, loader: int, number: int, leaf: int, client: int) -> Iterator[Any]:
        """One client's batches in a round; then what came of them is brought to the servers."""
        strategy, stepper = self._strategy, self._stepper
        shares = strategy.shares[loader]
        steps = range(shares.batches[client])
        self._delivered, taken = None, []
        stepper.step = number
        for schedule in self._schedules:
            schedule.at(number)
        strategy.take()
        feed.follow(number, ((step, client) for step in steps))
        for step in steps:
            if not strategy.ongoing:
                return  # too late: it would count for nothing
            start = time.perf_counter()
            self._session.row.enter(Phase.DATA)
            batch = Batch(stepper, feed, loader, number, step)
            stepper.mine, stepper.slot = [client], client
            share = batch.share(client)
            assert share is not None
            taken.append(batch.taken(client))
            stepper.split.data += time.perf_counter() - start
            stepper.begin(batch, start)
            set_seed(mix(self._run.settings.seed, IN_SHARE, number, step, client), self._run.device)
            yield share.value
            stepper.end_turn(self._steps)
        self._session.row.enter(Phase.REDUCE)
        moved = strategy.bring(leaf)
        stepper.split.communication += strategy.spent_s()
        self._delivered = Delivered(leaf, *tally(taken), shares.sizes_of[client], moved)

    def _boundary(self) -> None:
        return  # within a round there is nothing to keep

    def _leave(self) -> None:
        if self._stepper.active:
            self._stepper.end_turn(self._steps)
        with suppress(PacelineError):  # it may be on its way out because the run ends
            self._strategy.turn(0, [], leaves=True)
        self._left = True

    def come_together(self) -> None:
        if self._left:
            raise UsageError(
                f"{self._session.left}: the loop over the loader was left in the middle of a client; how much a client trains in a "
                "round is said by --strategy federated:steps=10 or epochs=2"
            )

    def _over(self, turned: Turned) -> None:
        for number, schedule in enumerate(self._schedules):
            schedule.within |= bool(turned.scheduled >> number & 1)
        super()._over(turned)

    def _rest(self, steps: int) -> None:
        super()._rest(steps)
        known = self._strategy.history.get(steps - 1)
        if known is not None and self._run.is_main:
            self._session.folder.event("round", _words(known), **known)
        if not self._run.stopped:
            self._run._keeping.checkpoint_if_due()


def _words(known: dict[str, Any]) -> str:
    """What became of a round, in a sentence."""
    came = known["clients"]
    words = f"{len(came)} client{'s' * (len(came) != 1)} counted, with {known['samples']:,} samples"
    for name, text in (("dropped", "dropped out"), ("lacking", "did not come in time")):
        if known[name]:
            words += f"; {', '.join(map(str, known[name]))} {text}"
    return words if came else f"{words}. Too few: θ stays as it is"
