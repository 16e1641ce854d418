"""What a run is made of, put together when all of it is known: the strategy gets its replica, the step its strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import strategies
from paceline.data.receipts import Tally
from paceline.embedding import tables_of
from paceline.errors import UsageError
from paceline.loop.loops import loop_of
from paceline.loop.pieces import Pieces
from paceline.loop.steps import Stepper
from paceline.strategies.base import Lasting, Seat, Served, Stepwise
from paceline.strategies.hooks import Hook
from paceline.worker import reaching
from paceline.worker.session import user_line

if TYPE_CHECKING:
    from paceline.run import Run


def put_together(run: Run) -> Stepper:
    """Once, when training begins: memory is laid out, and the step knows whom to tell of what."""
    session, replica, strategy = run._session, run._replica, run._strategy
    _refuse_without(run)
    if isinstance(strategy, Served):
        strategy.reach(reaching.parameters(session), session, _seat(run))
    if isinstance(strategy, Lasting):
        strategy.keep_in(session.lasting_segments, session.go_back)
    if strategies.find(run.settings.strategy).apart:
        replica.find_registered(run._registered.values())
        run._agreement.share_registered(run.settings.strategy)
    peers, scales = run.terms.peers, run._precision.scales
    strategy.attach(replica, peers, run._mean, run._precision if scales else None)
    driven = strategy if isinstance(strategy, Stepwise) else Pieces(replica, run._mean)
    stepper = Stepper(session, peers, driven, scales)
    _connect(run, stepper)
    if not isinstance(strategy, Stepwise):
        run._feeding.loop = loop_of(run, strategy, stepper)
    elif stepper.slots > 1:
        for model in replica.models:
            model.register_forward_pre_hook(Hook(stepper.flat.before_forward))
    return stepper


def _refuse_without(run: Run) -> None:
    if not run._replica.models:
        raise UsageError(f"{user_line()}: no model was given to run.prepare()")
    strategy = run.settings.strategy
    if tables_of(run._replica.models) and not strategies.find(strategy).rows:
        raise UsageError(
            f"a SparseEmbedding's rows lie at servers, which --strategy {strategy} does not train them at: pass "
            '--strategy ps (`paceline run --strategy ps --servers 2 …`), or paceline.init(strategy="ps") where the script '
            "runs alone"
        )


def _connect(run: Run, stepper: Stepper) -> None:
    run.terms.on_peers = [run._strategy.meet, stepper.meet]
    stepper.next_term = run.terms.next
    stepper.flat.refill = lambda: run.terms.refill(stepper.slots, run._keeping)
    stepper.flat.arrive = run.terms.enter_ready
    run.terms.flat = lambda: stepper.flat.known
    # The step of the reduce point in hand is not counted yet.
    stepper.stop_code = lambda: run._stopping.code(stepper.step + 1, run.metrics)
    stepper.settings_digest = run._replica.digest_of_settings if run._session.launched else int
    stepper.committed = run._after_commit
    stepper.delivered = run._keeping.delivered
    stepper.summed = not run._mean
    for optimizer in run._replica.optimizers:
        stepper.watch(optimizer)


def _seat(run: Run) -> Seat:
    session = run._session

    def tally(leaf: int) -> Tally:
        assert run._stepper is not None
        return run._stepper.tally_of(leaf)

    return Seat(session.worker, run.settings.slots, session.lost, session.check_run, lambda: session.view, tally)
