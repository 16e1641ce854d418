"""Run: what a training script holds."""

from __future__ import annotations

import io
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline import strategies
from paceline.data.order import mix
from paceline.data.random import set_seed
from paceline.errors import UsageError, a_kind
from paceline.folder import write_atomically
from paceline.launch.boot import tell_usage_errors_shortly
from paceline.launch.environment import ticket
from paceline.loop import checks, evaluation, wiring
from paceline.loop.feeding import Feeding
from paceline.loop.keeping import Keeping
from paceline.loop.precision import Precision
from paceline.loop.steps import Stepper
from paceline.loop.stopping import Stopping
from paceline.servers.keys_client import KeyValues
from paceline.state.replica import Replica
from paceline.strategies import survival
from paceline.strategies.base import InRounds, Served, Stepwise
from paceline.wires.board import Phase
from paceline.worker import ending, reaching, waiting
from paceline.worker.agreement import Agreement
from paceline.worker.session import Session, user_line, warn_of_user_line
from paceline.worker.terms import Terms

_LAID, _BARRIER = mix(209), mix(210)

current: Run | None = None
"""The run of this process; there is at most one."""


def init(**arguments: Any) -> Run:
    """Enter the run: the one an agent started this process for, or a run of one.

    Settings may be given here (`slots`, `threads`, `seed`, `strategy`, `precision`, `device`, `split`,
    `steps`, `epochs`, `seconds`, `target`, …); a flag on the command line wins over an argument.

        run = paceline.init(seed=1, precision="bf16")
    """
    global current
    if ticket() is None:
        tell_usage_errors_shortly()
    if current is not None and not current.finished:
        raise UsageError(f"{user_line()}: paceline.init() was called twice; keep the run it returned")
    for name in ("workers", "spares"):
        if name in arguments:
            raise UsageError(
                f"{user_line()}: the number of {name} is chosen at launch: paceline run -n 4 --spares 1 train.py"
            )
    checks.refuse_own_group()
    current = Run(Session(arguments))
    return current


class Run:
    """One training job, as one of its workers sees it. Made by `paceline.init()`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.settings = session.settings
        self.device = session.device
        self.dir = session.folder.path
        self.resumed = False
        self.state: dict[str, Any] = {}
        """Plain values of the script's own that belong to the run."""
        self.metrics: dict[str, float] = {}
        """The last value of each logged metric."""
        self.finished = False
        self._registered: dict[str, Any] = {}
        self._failed = False
        self._started = time.monotonic()
        self._replica = Replica(self.device)
        self._precision = Precision(self.settings.precision, self.device)
        self._mean = True
        self._epochs_done = self._epochs_asked = 0
        self._entered = False
        """A newcomer has its state."""
        self.terms = Terms(session)
        self._agreement = Agreement(session, self.terms, self._replica)
        self._keeping = Keeping(self)
        self._stopping = Stopping(session, self.terms)
        self._feeding = Feeding(session, self.terms, self._stopping, self._keeping.at_boundary)
        set_seed(mix(self.settings.seed), self.device)
        session.row.enter(Phase.SCRIPT)
        if self.is_main:
            session.write_config()
            session.folder.event("started", "init() was called", workers=session.workers, slots=self.settings.slots)
        else:
            waiting.for_main(session)
        self._strategy = strategies.create(self.settings.strategy)
        session.loose = not isinstance(self._strategy, Stepwise)
        self._feeding.strategy = self._strategy
        self._stepper: Stepper | None = None
        self._laid = False
        self._kv: KeyValues | None = None
        self._forgotten: checks.ForgottenOptimizers | None = None
        self._have_stepped = WeakSet[torch.optim.Optimizer]()
        if not session.launched:
            ending.at_exit(self)

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for the run: writes metrics and files. If it dies, another does."""
        return self._session.is_main

    @property
    def workers(self) -> int:
        """How many workers train, as this one knows; another number after a loss or a join."""
        return self._session.workers

    @property
    def rank(self) -> int:
        """This worker's place among them, from 0 on; it may be another one then."""
        return self._session.rank

    @property
    def kv(self) -> KeyValues:
        """Named tensors at the run's servers, for algorithms of one's own. See docs/kv.md."""
        if self._kv is None:
            if self._session.launched and not self.settings.servers:
                raise UsageError(
                    f"{user_line()}: run.kv keeps its keys at servers, and this run has none: add --servers 1 to the command "
                    "(2, if the keys are to survive a server's death)"
                )
            if self.is_main:
                self._session.board.main_ready = True  # the others may come: what they need is in the keys
            self._kv = KeyValues(reaching.keys(self._session), self._session.worker, self._kv_barrier)
        return self._kv

    def _kv_barrier(self) -> None:
        self._between_points("run.kv.barrier()")
        if self._session.joining and self._stepper is None:
            waiting.for_loop(self._session)
        if self._stepper is None:  # a loop of the script's own: this is where its workers agree
            self._stopping.agree(0, self.metrics)
        else:
            self.terms.gather(_BARRIER, bytes)

    @property
    def stopped(self) -> str | None:
        """Why the run was stopped before its end, if it was."""
        return self._stopping.reason

    # what the script gives

    def prepare(self, *objects: Any, loss: str | None = None) -> Any:
        """Hand over what is trained: models, optimizers, schedulers, the loader. In place, no wrappers.

        Everyone gets worker 0's weights. `loss="sum"` adds the shares' gradients instead of averaging ("mean").
        Returns what it was given.
        """
        if loss not in (None, "mean", "sum"):
            raise UsageError(f'prepare(loss={loss!r}): say "mean" or "sum"')
        if loss is not None:
            self._mean = loss == "mean"
        if self._stepper is not None:
            raise UsageError(f"{user_line()}: prepare() after training has begun; prepare everything before the loop")
        checks.refuse_own_group()
        self._session.at = "prepare()"
        if self.is_main:
            self._session.board.main_ready = True
        models = [item for item in objects if isinstance(item, nn.Module)]
        for model in models:
            self._replica.add_model(model)
            self._precision.attach(model)
        for item in objects:
            self._take(item)
        if models:
            self._agreement.share_weights()
        return objects[0] if len(objects) == 1 else objects

    def _take(self, item: Any) -> None:
        if isinstance(item, nn.Module):
            return
        if isinstance(item, torch.optim.Optimizer):
            self._replica.optimizers.append(item)
            item.register_step_pre_hook(self._before_step)
        elif isinstance(item, (LRScheduler, ReduceLROnPlateau)):
            self._replica.schedulers.append(item)
        elif isinstance(item, DataLoader):
            self._feeding.add(item)
        elif hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
            self.register(f"{type(item).__name__}-{len(self._registered)}", item)
        else:
            raise UsageError(
                f"{user_line()}: prepare() cannot use {a_kind(item)}; it takes models, optimizers, schedulers, "
                "DataLoaders and anything with state_dict/load_state_dict"
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        checks.optimizer_steps(self._stepper, args, kwargs)
        if optimizer not in self._have_stepped:
            self._have_stepped.add(optimizer)
            if self.settings.precision != "fp16" and (text := checks.first_step(optimizer, args, kwargs)):
                self._warn(text)

    def register(self, name: str, item: Any) -> None:
        """Name something with state_dict/load_state_dict that belongs to the run (an EMA, a scaler)."""
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise UsageError(
                f"register({name!r}): {a_kind(item)} has no state_dict and load_state_dict; give an object that has both "
                f"(torch's AveragedModel), or keep tensors and plain values in run.state[{name!r}] and use them from there"
            )
        if name in self._registered:
            raise UsageError(f"register({name!r}): the name is taken")
        if self._stepper is not None:
            raise UsageError(
                f"{user_line()}: register({name!r}) after training has begun: whoever takes a lost worker's place would not have it; "
                "register before the loop"
            )
        self._registered[name] = item

    # loops

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self._stepper.step if self._stepper else 0

    @property
    def epoch(self) -> int:
        return self._stepper.epoch if self._stepper else 0

    def epochs(self, count: int) -> Iterator[int]:
        """So many epochs, behind those that were asked for before; a resumed run goes on where it stood.

        Their numbers go on: after `epochs(2)`, a second `epochs(2)` gives 2 and 3.
        """
        stepper = self._begin_loop()
        rounds = self._strategy.rounds if isinstance(self._strategy, InRounds) else 0
        # What was asked for before says where a loop begins, not what was trained: so a newcomer, or a resumed run, goes
        # through its script's earlier loops without an epoch and lands in the one where the others are.
        first, self._epochs_asked = self._epochs_asked, self._epochs_asked + (rounds or self.settings.epochs or count)
        last = self._epochs_asked
        if first and self.stopped and not self._feeding.begun(first, last):
            last = first  # in an earlier loop
        try:
            for epoch in range(max(stepper.epoch, first), last):
                stepper.epoch = epoch
                self._session.row.describe(total_steps=self._feeding.total_steps(last))
                yield epoch
                self._feeding.leave_loops()
                if self.stopped and not self._feeding.at_end:
                    if self._feeding.loop is None:
                        self._keeping.at_stop()  # if the script has left its loop in that very step
                    break  # in the middle of an epoch, which a resumed run goes on with
                self._epochs_done = stepper.epoch = epoch + 1
                self._feeding.epoch_done()
                if self.stopped:
                    break
                self._between_points("the end of an epoch")
                if self._stopping.agree(stepper.step, self.metrics):
                    self._keeping.at_stop()
                    break
        finally:
            self._feeding.end_loop()

    def steps(self, count: int) -> Iterator[int]:
        """Steps for scripts that draw their own batches; random state is set at each share."""
        stepper = self._begin_loop()
        limit = min(count, self.settings.steps or count)
        self._session.row.describe(total_steps=limit)
        loop = self._feeding.loop
        try:
            yield from self._feeding.over_steps(
                lambda: self._over_steps(stepper, limit) if loop is None else loop.over_steps(count),
                count,
                self._epochs_asked,
            )
        except GeneratorExit:
            if loop is None and self.stopped:
                self._keeping.at_stop()  # agreed on in the very step in which the script leaves
            raise
        finally:
            self._feeding.end_loop()

    def _over_steps(self, stepper: Stepper, limit: int) -> Iterator[int]:
        self.terms.catching_up = False
        stepper.gaps.begin()
        try:
            for number in range(stepper.step, limit if not self.stopped else 0):
                stepper.flat.fill()
                stepper.begin(None, time.perf_counter())
                yield number
                stepper.end()
                self._keeping.at_boundary(last=number + 1 == limit)
                if self.stopped:
                    break
        finally:
            stepper.abandon()

    def slots(self, count: int | None = None) -> Iterator[Any]:
        """This worker's shares of the batch in hand. When the loop ends, `.grad` is the whole batch's.

        `slots(k)` cuts the step into k shares instead of the run's number of slots.
        """
        if self._stepper is None:
            raise UsageError(f"{user_line()}: run.slots() before `for epoch in run.epochs(n):`")
        return self._stepper.shares(count)

    def weight(self, count: float) -> None:
        """This share counts for so much (tokens, say) instead of its samples; before backward."""
        if self._stepper is None:
            raise UsageError(f"{user_line()}: run.weight() belongs inside the loop over run.slots()")
        self._stepper.weigh(count)

    def _begin_loop(self) -> Stepper:
        if self._stepper is None:
            checks.refuse_unprepared(self._replica)
            self._stepper = wiring.put_together(self)
            if self.is_main and self._session.workers > 1:
                self._session.notice(survival.words(self.settings, socket.gethostname()))
            self._forgotten = checks.ForgottenOptimizers(self._replica, self._registered, self._warn)
            for text in checks.forgotten_schedulers(self._replica, self._registered.values()):
                self._warn(text)
            if self._session.workers > 1 or self.settings.checkpoint_every:
                for text in checks.forgotten_averages(self._replica, self._registered.values()):
                    self._warn(text)
        if self._session.joining and not self._entered:
            self._entered = True
            self._feeding.loop.enter() if self._feeding.loop is not None else self.terms.join(self._keeping)
            self.resumed = self._laid = True
            self._session.resume_from = ""  # the run has done that
        elif self._session.resume_from:
            self._keeping.resume(self._session.resume_from)
            self._stopping.resumed(self.step)
            self._session.resume_from = ""
        self._begin_at_servers()
        if self._session.dry_run:
            self._show_settings()
        joined = self._session.joining
        self._keeping.begin()
        if self._feeding.loop is not None and not joined:
            self._feeding.loop.begin()
        if self._feeding.training:
            raise UsageError(f"{user_line()}: run.epochs() and run.steps() do not nest")
        self._feeding.begin_loop(self._stepper)
        return self._stepper

    def _begin_at_servers(self) -> None:
        """They have the state before anybody trains; whoever is main gives it to them."""
        strategy = self._strategy
        if not isinstance(strategy, Served) or self._session.dry_run:
            return

        def lay() -> bytes:
            if self.is_main:
                strategy.lay()
            return b""

        if not self._laid:
            self._laid = True
            self.terms.gather(_LAID, lay)
        strategy.begin()

    def _show_settings(self) -> NoReturn:
        """--dry-run ends where training would begin."""
        lines = [f"{name:12} {value!s:24} {self._session.origins[name]}" for name, value in vars(self.settings).items()]
        sys.stdout.write("\n".join([*lines, *self._feeding.words()]) + "\n")
        self.finished = True
        raise SystemExit(0)

    # stopping

    def stop(self, reason: str) -> None:
        """Ask for a stop that all workers agree on: training ends after the next step."""
        self._stopping.ask(reason)

    def _after_commit(self, codes: list[int]) -> None:
        self.terms.committed(self.step)
        if self._precision.scales:
            self._precision.after_commit(self._replica.params)
        if any(codes):
            self._stopping.settle(codes, self.step)

    # what the script tells

    def log(self, **values: Any) -> None:
        """Record metrics of this step. Worker 0's values go to metrics.jsonl and decide a target."""
        self.metrics.update({name: float(value) for name, value in values.items()})
        if self.is_main:
            self._session.folder.metric(self.step, self.epoch, {k: self.metrics[k] for k in values})
            if "loss" in values:
                self._session.row.metric(self.metrics["loss"])

    def save(self, value: Any, path: str | Path) -> None:
        """torch.save by worker 0 alone, all or nothing."""
        if self.is_main:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            write_atomically(Path(path), buffer.getvalue())

    def evaluate(self, fn: Callable[[Any], dict[str, Any]], loader: Any) -> dict[str, float]:
        """Sum fn(batch) over a loader, split over the workers, each sample once. See docs."""
        self._between_points("evaluate() and predict()")
        return self.terms.through(lambda: evaluation.evaluate(self, fn, loader))

    def predict(self, fn: Callable[[Any], torch.Tensor], loader: Any) -> torch.Tensor:
        """fn(batch) over a loader, split over the workers, concatenated in order on every worker."""
        self._between_points("evaluate() and predict()")
        return self.terms.through(lambda: evaluation.predict(self, fn, loader))

    def _between_points(self, what: str) -> None:
        """All workers meet here."""
        if self._stepper is not None:
            checks.between_points(self._stepper, what, self._feeding.loop is not None)
        if self._feeding.loop is not None:
            self._feeding.loop.come_together()
        self._session.at = what

    def _warn(self, text: str) -> None:
        if self.is_main:
            self._session.folder.event("warning", text)
            warn_of_user_line(f"paceline: {text}")

    def finish(self) -> None:
        """End the run: agree that all replicas are equal, write the summary. Automatic at exit."""
        if not self.finished:
            self.finished = True
            ending.end(self)
