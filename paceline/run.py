"""Run: what a training script holds."""

from __future__ import annotations

import atexit
import gc
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline import strategies
from paceline.cluster.board import Phase
from paceline.data.loader import Feed, adopt, adopted, build_feed
from paceline.data.order import mix
from paceline.data.partition import Split, skew
from paceline.data.random import set_seed
from paceline.errors import OWN_GROUP, PacelineError, UsageError
from paceline.hooks import Hook
from paceline.keeping import Keeping
from paceline.launch.boot import tell_usage_errors_shortly
from paceline.launch.environment import ticket
from paceline.precision import Precision
from paceline.replica import Replica
from paceline.session import Session, user_line
from paceline.settings import StopRules
from paceline.steps import Batch, Stepper, line_of_close
from paceline.summary import summarise
from paceline.tensors.peers import TermEnded
from paceline.terms import Terms
from paceline.watch.folder import write_atomically

_STOP_WORDS = {
    1: "a stop rule",
    2: "run.stop()",
    3: "Ctrl-C",
}
_KEYS = {name: mix(number) for number, name in enumerate(["prepare", "weights", "epoch", "finish", "written"])}

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
    if "workers" in arguments:
        raise UsageError(f"{user_line()}: the number of workers is chosen at launch: paceline run -n 4 train.py")
    _refuse_own_group()
    current = Run(Session(arguments))
    return current


def _refuse_own_group() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(f"{user_line()}: {OWN_GROUP}")


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
        self.stopped: str | None = None
        """Why the run was stopped before its end, if it was."""
        self._registered: dict[str, Any] = {}
        self._failed = False
        self._started = time.monotonic()
        self._rules = StopRules.of(self.settings)
        self._asked: str | None = None
        self._due: str | None = None
        self._replica = Replica(self.device)
        self._precision = Precision(self.settings.precision, self.device)
        self._feeds: list[Feed] = []
        self._positions: dict[int, tuple[int, int]] = {}
        self._mean = True
        self._in_loop = False
        self._attached = False
        self._epochs_done = 0
        self._keeping = Keeping(self)
        set_seed(mix(self.settings.seed), self.device)
        session.row.enter(Phase.SCRIPT)
        if self.is_main:
            session.write_config()
            session.folder.event("started", "init() was called", workers=session.workers, slots=self.settings.slots)
        else:
            session.wait_for_main()
        self.terms = Terms(session)
        self._strategy = strategies.create(self.settings.strategy)
        self._stepper: Stepper | None = None
        if not session.launched:
            _finish_at_exit(self)

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for the run: writes metrics and files. If it dies, another does."""
        return self._session.is_main

    # what the script gives

    def prepare(self, *objects: Any, loss: str = "mean") -> Any:
        """Hand over what is trained: models, optimizers, schedulers, the loader. In place, no wrappers.

        Everyone gets worker 0's weights. `loss="sum"` adds the shares' gradients instead of averaging.
        Returns what it was given.
        """
        if loss not in ("mean", "sum"):
            raise UsageError(f'prepare(loss={loss!r}): say "mean" or "sum"')
        self._mean = loss == "mean"
        if self._attached:
            raise UsageError(f"{user_line()}: prepare() after training has begun; prepare everything before the loop")
        _refuse_own_group()
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
            self._share_weights()
        return objects[0] if len(objects) == 1 else objects

    def _take(self, item: Any) -> None:
        if isinstance(item, nn.Module):
            return
        if isinstance(item, torch.optim.Optimizer):
            self._replica.optimizers.append(item)
            item.register_step_pre_hook(self._guard_step)
        elif isinstance(item, (LRScheduler, ReduceLROnPlateau)):
            self._replica.schedulers.append(item)
        elif isinstance(item, DataLoader):
            self._adopt(item)
        elif hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
            self.register(f"{type(item).__name__}-{len(self._registered)}", item)
        else:
            raise UsageError(
                f"{user_line()}: prepare() cannot use a {type(item).__name__}; it takes models, optimizers, schedulers, "
                "DataLoaders and anything with state_dict/load_state_dict"
            )

    def _adopt(self, loader: DataLoader[Any]) -> None:
        if adopted(loader):
            raise UsageError(f"{user_line()}: this loader was given to prepare() already")
        split = Split.parse(self.settings.split, self.settings.slots)
        feed = build_feed(loader, self.settings.slots, split, mix(self.settings.seed, len(self._feeds)))
        self._feeds.append(feed)
        if self.is_main and len(self._feeds) == 1:
            words, sizes = self._batch_words(feed, split), feed.sizes(0, 0) if feed.steps else None
            self._session.notice(words)
            self._session.folder.event("data", words, steps=feed.steps, skew=skew(sizes) if sizes else None)
        adopt(loader, lambda: self._iterate(feed), lambda: _length(feed))

    def _batch_words(self, feed: Feed, split: Split) -> str:
        slots = self.settings.slots
        if feed.batch is None:
            return f"the loader's own batches, over {slots} slot{'s' * (slots != 1)} a step"
        sizes = sorted({last - first for first, last in split.cut(feed.batch, slots)}, reverse=True)
        return f"batch {feed.batch} = {slots} slot{'s' * (slots != 1)} × {' or '.join(map(str, sizes))}"

    def _share_weights(self) -> None:
        """Everyone starts from worker 0's weights; say so if they differed."""
        if self._session.joining:
            return  # it gets the run's state before its first batch
        mine = self._replica.weights_sha256()
        hashes = [raw.decode() for raw in self.terms.gather(_KEYS["prepare"], mine.encode)]
        different = self._odd_workers(hashes)
        if not different:
            return
        state = self._replica.state_dict()
        whole = self.terms.gather(
            _KEYS["weights"], lambda: b"".join(_raw(tensor) for tensor in state.values()) if self.is_main else b""
        )[0]
        at = 0
        with torch.no_grad():
            for tensor in state.values():
                size = tensor.numel() * tensor.element_size()
                if size:
                    raw = bytearray(whole[at : at + size])
                    tensor.copy_(torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape))
                at += size
        if self.is_main:
            who = ", ".join(map(str, different))
            self._session.notice(f"the first weights of worker {who} differed: all now start from worker 0's")

    def _odd_workers(self, hashes: list[str]) -> list[int]:
        members = self._session.view.members
        return [members[rank] for rank, value in enumerate(hashes) if value != hashes[0]]

    def register(self, name: str, item: Any) -> None:
        """Name something with state_dict/load_state_dict that belongs to the run (an EMA, a scaler)."""
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise UsageError(f"register({name!r}): a {type(item).__name__} has no state_dict and load_state_dict")
        if name in self._registered:
            raise UsageError(f"register({name!r}): the name is taken")
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
        """The epochs to train, from where the run stands."""
        stepper = self._begin_loop()
        count = self.settings.epochs or count
        try:
            for epoch in range(stepper.epoch, count):
                stepper.epoch = epoch
                self._tell_total(count)
                yield epoch
                self._epochs_done = epoch + 1
                self._positions = {}
                self._agree_to_stop()
                if self.stopped:
                    break
        finally:
            self._in_loop = False

    def steps(self, count: int) -> Iterator[int]:
        """Steps for scripts that draw their own batches; random state is set at each share."""
        stepper = self._begin_loop()
        limit = min(count, self.settings.steps or count)
        self._session.row.describe(total_steps=limit)
        self.terms.catching_up = False
        try:
            for number in range(stepper.step, limit):
                stepper.begin(None)
                yield number
                stepper.end()
                self._keeping.at_boundary()
                if self.stopped:
                    break
        finally:
            stepper.abandon()
            self._in_loop = False

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
        if not self._attached:
            self._attach()
        assert self._stepper is not None
        if self._session.joining:
            self.terms.join(self._keeping)
            self.resumed = True
        elif self._session.resume_from and not self.resumed:
            self._keeping.resume(self._session.resume_from)
        if self._session.dry_run:
            self._show_settings()
        self._keeping.begin()
        if self._in_loop:
            raise UsageError(f"{user_line()}: run.epochs() and run.steps() do not nest")
        self._in_loop = True
        return self._stepper

    def _show_settings(self) -> NoReturn:
        """--dry-run ends where training would begin."""
        feed = self._feeds[0] if self._feeds else None
        lines = [f"{name:12} {value!s:24} {self._session.origins[name]}" for name, value in vars(self.settings).items()]
        if feed is not None:
            split = Split.parse(self.settings.split, self.settings.slots)
            lines += [self._batch_words(feed, split), f"{feed.steps or 'an unknown number of'} steps an epoch"]
        sys.stdout.write("\n".join(lines) + "\n")
        self.finished = True
        raise SystemExit(0)

    def _attach(self) -> None:
        """Everything is known: lay out memory, and look for what was forgotten."""
        if not self._replica.models:
            raise UsageError(f"{user_line()}: no model was given to run.prepare()")
        precision = self._precision
        peers = self.terms.peers
        self._strategy.attach(self._replica, peers, self._mean, precision if precision.scales else None)
        self._stepper = Stepper(self._session, peers, self._strategy, precision.scales)
        self.terms.on_peers = [self._strategy.meet, self._stepper.meet]
        self._stepper.next_term = self.terms.next
        self._stepper.stop_code = self._stop_code
        self._stepper.settings_digest = self._replica.digest_of_settings if self._session.launched else int
        self._stepper.committed = self._after_commit
        self._stepper.delivered = self._keeping.delivered
        self._stepper.summed = not self._mean
        if self._stepper.flat_allowed and peers.size > 1:
            for model in self._replica.models:
                model.register_forward_pre_hook(Hook(self._stepper.before_forward))
        self._attached = True
        self._warn_of_schedulers()

    def _warn_of_schedulers(self) -> None:
        known = {id(item) for item in [*self._replica.schedulers, *self._registered.values()]}
        driven = {id(optimizer) for optimizer in self._replica.optimizers}
        for item in gc.get_objects():
            if issubclass(type(item), LRScheduler) and id(item) not in known and id(item.optimizer) in driven:
                self._warn(
                    f"a {type(item).__name__} drives a prepared optimizer but was not given to prepare(): it works, "
                    "but a resumed run would start it anew; add it to prepare()"
                )

    def _tell_total(self, epochs: int) -> None:
        per_epoch = self._feeds[0].steps if self._feeds else None
        total = per_epoch * epochs if per_epoch else 0
        if self.settings.steps:
            total = min(total, self.settings.steps) if total else self.settings.steps
        self._session.row.describe(total_steps=total)

    def _iterate(self, feed: Feed) -> Iterator[Any]:
        """What `for batch in loader` runs."""
        stepper = self._stepper
        if stepper is None or not self._in_loop:
            yield from self._peek(feed)
            return
        epoch, key = stepper.epoch, id(feed)
        known, number = self._positions.get(key, (epoch, 0))
        number = number if known == epoch else 0
        aimed = stepper.mine
        feed.start(epoch, number, aimed)
        self._session.left = None
        self.terms.catching_up = False
        try:
            while not self.stopped and (feed.steps is None or number < feed.steps):
                start = time.perf_counter()
                self._session.row.enter(Phase.DATA)
                batch = Batch(stepper, feed, epoch, number)
                if feed.steps is None and not any(batch.sizes or [0]):
                    break
                if stepper.active:
                    raise UsageError(
                        f"{user_line()}: two loops over prepared loaders at once (zip(), or one inside the other): a step has "
                        "one loader; leave the other out of prepare()"
                    )
                offered = batch.offered() if stepper.flat_allowed else batch
                took = time.perf_counter() - start
                stepper.split.data += took
                stepper.split.total += took
                stepper.begin(batch)
                yield offered
                stepper.end()
                number += 1
                self._positions[key] = (epoch, number)
                self._keeping.at_boundary()
                if stepper.mine != aimed:
                    aimed = stepper.mine
                    feed.start(epoch, number, aimed)
        except GeneratorExit:
            self._session.left = line_of_close()
            if stepper.abandon():
                self._positions[key] = (epoch, number + 1)
            raise
        finally:
            feed.stop()

    def _peek(self, feed: Feed) -> Iterator[Any]:
        """Batches outside the training loop: looked at, not counted."""
        slots = range(self.settings.slots)
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

    # stopping

    def stop(self, reason: str) -> None:
        """Ask for a stop that all workers agree on: training ends after the next step."""
        self._asked = self._asked or reason

    def _stop_code(self) -> int:
        """What this worker says about stopping at this reduce point."""
        if self._asked:
            return 2
        if self._session.board.stop_asked:
            return 3
        stepper = self._stepper
        assert stepper is not None
        self._due = self._due_at(stepper.step + 1)
        return 1 if self._due else 0

    def _due_at(self, step: int) -> str | None:
        """A target is worker 0's to decide: the others may log their own share's values."""
        return self._rules.due(step, time.monotonic() - self._started, self.metrics if self.is_main else {})

    def _after_commit(self, codes: list[int]) -> None:
        if self._precision.scales:
            self._precision.after_commit(self._replica.params)
        if any(codes):
            self._stop_for(codes)

    def _stop_for(self, codes: list[int]) -> None:
        rank = next(rank for rank, code in enumerate(codes) if code)
        who = self._session.view.members[rank]
        reason = self._asked or self._due
        self.stopped = reason or f"{_STOP_WORDS[codes[rank]]} on worker {who}"
        if codes[rank] == 3:
            self.stopped = "interrupted (Ctrl-C)"
        if self.is_main:
            self._session.folder.event("stopping", self.stopped, step=self.step, worker=who)

    def _agree_to_stop(self) -> None:
        """At an epoch's end a wish to stop need not wait for another step."""
        stepper = self._stepper
        assert stepper is not None
        self._between_points("the end of an epoch")
        self._session.at = "the end of an epoch"
        self._due = self._due_at(stepper.step)
        code = 2 if self._asked else 3 if self._session.board.stop_asked else 1 if self._due else 0
        codes = [raw[0] for raw in self.terms.gather(_KEYS["epoch"], lambda: bytes([code]))]
        if any(codes) and not self.stopped:
            self._stop_for(codes)

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
        from paceline.evaluation import again, evaluate

        sums: dict[str, float] = again(self, lambda: evaluate(self, fn, loader))
        return sums

    def predict(self, fn: Callable[[Any], torch.Tensor], loader: Any) -> torch.Tensor:
        """fn(batch) over a loader, split over the workers, concatenated in order on every worker."""
        from paceline.evaluation import again, predict

        values: torch.Tensor = again(self, lambda: predict(self, fn, loader))
        return values

    def _between_points(self, what: str) -> None:
        """Workers meet here: none of them may be in the middle of a reduce point."""
        if self._stepper is not None:
            self._stepper.check_left_early()
            if self._stepper.inside:
                raise UsageError(f"{user_line()}: {what} inside the loop over run.slots(); move it one level out")

    def _guard_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """optimizer.step() where no reduced gradient can be: say so instead of training apart."""
        stepper = self._stepper
        if stepper is not None and not stepper.alone and (args[1:] or kwargs.get("closure")):
            raise UsageError(
                f"{user_line()}: optimizer.step(closure) computes gradients out of reach of the other workers; only a run of "
                "one slot can use it (paceline run -n 1 --slots 1)"
            )
        if stepper is not None and stepper.inside:
            raise UsageError(
                f"{user_line()}: optimizer.step() inside the loop over run.slots(): the gradient is whole only after it; "
                "move optimizer.step() one level out"
            )
        if stepper is None or not stepper.active:
            raise UsageError(
                f"{user_line()}: optimizer.step() outside a step of the run: the loader in this loop was not given to "
                "run.prepare(), or the loop is not inside `for epoch in run.epochs(n):`"
            )
        if stepper.left_early is not None:
            stepper.check_left_early()
        if stepper.call == 0 and not stepper.alone:
            stepper.no_reduce()

    def _warn(self, text: str) -> None:
        if self.is_main:
            self._session.folder.event("warning", text)
            warnings.warn(f"paceline: {text}", UserWarning, stacklevel=3)

    # the end

    def _tell_the_end(self, digest: str) -> None:
        """Main writes the summary, and all wait until it has: if it dies before, another one does."""
        while True:
            if self.is_main:
                self._keeping.ledger.close()
                summarise(self, digest, "failed" if self._failed else self.stopped or "finished")
            try:
                self.terms.meeting.gather(_KEYS["written"], b"")
                return
            except TermEnded:
                self.terms.next()

    def finish(self) -> None:
        """End the run: agree that all replicas are equal, write the summary. Automatic at exit."""
        if self.finished:
            return
        self.finished = True
        self._between_points("the end of the script")
        self._session.at = "the end of the script"
        digest = self._replica.weights_sha256()
        hashes = [raw.decode() for raw in self.terms.gather(_KEYS["finish"], digest.encode)]
        different = self._odd_workers(hashes)
        if different and self._strategy.same_bits:
            raise PacelineError(
                f"the final weights of worker {', '.join(map(str, different))} differ from worker 0's: something "
                "outside run.slots() changed them differently (a random draw by worker, say)"
            )
        self._keeping.finish()
        self._tell_the_end(digest)
        if self._attached:
            self._strategy.close()
        self.terms.peers.close()
        self._session.leave()


def _length(feed: Feed) -> int:
    if feed.steps is None:
        raise TypeError("the length of a stream is not known")
    return feed.steps


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _finish_at_exit(run: Run) -> None:
    """A run of one has no agent: it ends with its process, and remembers an exception on the way."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        run._failed = True
        if isinstance(error, UsageError):
            run.finished = True
            run._session.folder.event("failed", str(error))
            run._session.folder.write_json(
                run._session.folder.summary,
                {"run": run._session.folder.id, "exit": f"failed: {error}", "steps": run.step},
            )
        previous(kind, error, trace)

    sys.excepthook = note
    atexit.register(run.finish)
