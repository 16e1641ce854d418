"""A run's settings: few, each with an owner, and each value knows where it came from.

A flag on the command line wins over an argument of `paceline.init()`, which wins over the default.
No torch in here: the command line reads it too.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.strategies import Entry

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""Where our own code lies: what is called from elsewhere is the script's."""
PRECISIONS = ("fp32", "bf16", "fp16")
TRANSPORTS = ("auto", "shm", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
ON_DEATH = ("replay", "drop")
BITS = ("slots", "threads", "seed", "strategy", "precision", "split")
"""Settings that are part of a run's bits: a resume with another value is refused."""


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    workers: int = _setting(1, "processes that train")
    spares: int = _setting(0, "processes that wait, ready to take the place of one that is lost")
    servers: int = _setting(
        0, "processes that hold parameters, and the keys of run.kv (0: one, where the strategy has any)"
    )
    replicas: int = _setting(2, "copies of what servers hold, each on another server as far as there are any")
    machines: int = _setting(1, "machines that the run begins with; the others join with `paceline agent`")
    listen: str = _setting("", "the address, HOST or HOST:PORT, at which other machines reach this one")
    store: str = _setting("", "where the run's decisions are kept for several machines: etcd://HOST:PORT,…")
    slots: int = _setting(0, "logical workers; fixed for the whole run (0: the next power of two from workers)")
    threads: int = _setting(1, "threads of each worker; part of the run's bits, never derived from the machine")
    seed: int = _setting(0, "seed of weights, sample order and every random draw")
    strategy: str = _setting("allreduce", "how workers keep in step")
    precision: str = _setting("fp32", "fp32, bf16 or fp16 for the models' forward passes")
    device: str = _setting("auto", "auto, cpu or cuda")
    share_gpus: bool = _setting(False, "let several workers use one GPU")
    transport: str = _setting("auto", "auto, shm, gloo or nccl: how tensors move between workers")
    shm_limit: int = _setting(0, "most bytes of shared memory the run may take (0: what is free)")
    split: str = _setting("even", "how data is cut: even, rows, or one weight a slot")
    checkpoint_every: int = _setting(0, "write a checkpoint every so many steps, and when stopped (0: none)")
    checkpoints: str = _setting("", "where checkpoints go: a folder or any fsspec address (empty: the run folder)")
    keep: int = _setting(3, "how many checkpoints to keep")
    lease: float = _setting(3.0, "seconds for which a process may be frozen before it counts as lost")
    step_timeout: float = _setting(
        0.0,
        "seconds for which others wait for a worker that does not go on before it is ended and replaced (0: for ever)",
    )
    grace: float = _setting(60.0, "seconds that workers train on without a coordinator before they stop")
    on_death: str = _setting(
        "replay", "of a replica that trains apart: replay what it has trained, or drop it and go on with the others"
    )
    drop_after: float = _setting(5.0, "seconds for which the others wait for a lost replica before they drop it")
    min_workers: int = _setting(2, "replicas without which a run that drops lost ones waits for another worker")
    state_copies: bool = _setting(
        True, "copy each replica's state to another machine while it trains, so that its own may be lost"
    )
    steps: int = _setting(0, "stop after this many steps (0: no limit)")
    epochs: int = _setting(0, "train this many epochs instead of the script's own number (0: the script's)")
    seconds: float = _setting(0.0, "stop after this many seconds (0: no limit)")
    target: str = _setting("", "stop when a logged metric gets there, such as accuracy>=0.9")

    def resolved(self) -> Settings:
        """With every value checked, and the defaults that follow from others filled in."""
        _check(self)
        entry = _strategy_of(self)
        slots = self.slots or (self.workers if entry.apart else next_power_of_two(self.workers))
        if entry.apart and slots != self.workers:
            raise UsageError(
                f"{self.workers} workers for {slots} slots: with --strategy {self.strategy} each worker trains a replica of its "
                f"own, which is one slot; pass -n {slots}; or a new run with --slots {self.workers}"
            )
        if slots < self.workers:
            why = (
                "the workers that train clients are no more than the slots"
                if entry.clients
                else "a worker without a slot would have nothing to do"
            )
            raise UsageError(
                f"{self.workers} workers for {slots} slots: {why}; "
                f"pass -n {slots}; or a new run with --slots {self.workers} or more"
            )
        servers = self.servers or int(entry.servers)
        return dataclasses.replace(self, slots=slots, servers=servers, checkpoints=_anywhere(self.checkpoints))


def _anywhere(address: str) -> str:
    """A path that means the same from every directory; an address with a scheme does already."""
    return os.path.abspath(address) if address and "://" not in address else address


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _check(s: Settings) -> None:
    for name, least in (
        ("workers", 1),
        ("spares", 0),
        ("servers", 0),
        ("replicas", 1),
        ("machines", 1),
        ("slots", 0),
        ("threads", 1),
        ("steps", 0),
        ("epochs", 0),
        ("seconds", 0),
        ("checkpoint_every", 0),
        ("keep", 1),
        ("step_timeout", 0),
        ("lease", 0.1),
        ("grace", 1),
        ("drop_after", 0),
        ("min_workers", 1),
        ("shm_limit", 0),
    ):
        value = getattr(s, name)
        if not isinstance(value, (int, float)) or value != value:
            raise UsageError(f"--{name.replace('_', '-')} must be a number; it is {value!r}")
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be {least} or more; it is {value}")
    for name, known in (
        ("precision", PRECISIONS),
        ("transport", TRANSPORTS),
        ("device", DEVICES),
        ("on_death", ON_DEATH),
    ):
        if getattr(s, name) not in known:
            near = did_you_mean(getattr(s, name), known)
            raise UsageError(f"--{name.replace('_', '-')} {getattr(s, name)!r} is none of: {', '.join(known)}{near}")
    if s.target:
        Target.parse(s.target)
    _check_machines(s)
    _check_strategy(s)


def _check_machines(s: Settings) -> None:
    if not s.listen and (s.machines > 1 or s.store):
        asked = f"--machines {s.machines}" if s.machines > 1 else "--store"
        raise UsageError(f"{asked} needs --listen HOST: the address at which other machines reach this one")
    if s.listen and not re.fullmatch(r"\[?[^\[\]]+?\]?(:\d+)?", s.listen):
        raise UsageError(f"--listen {s.listen!r} is no address: write HOST or HOST:PORT")
    if s.machines > s.workers:
        raise UsageError(f"{s.machines} machines for {s.workers} workers: pass -n {s.machines} or more")
    if s.listen and s.transport in ("gloo", "nccl"):
        raise UsageError(f"--transport {s.transport} is for one machine; leave it out, and tensors find their way")


def _check_strategy(s: Settings) -> None:
    entry = _strategy_of(s)
    if entry.one and s.servers > 1:
        raise UsageError(
            f"--servers {s.servers}: --strategy {s.strategy} has all variables at one server; leave it out, or pass "
            "--strategy ps"
        )
    if s.on_death == "drop":
        _check_drop(s, entry)


def _check_drop(s: Settings, entry: Entry) -> None:
    if not entry.apart:
        raise UsageError(
            f"--on-death drop is for replicas that train apart; with --strategy {s.strategy} nothing of a lost worker is missed, "
            "as the others do its share: leave it out"
        )
    if s.min_workers > s.workers:
        raise UsageError(
            f"--min-workers {s.min_workers} of {s.workers}: a run that would wait from its first step on; pass -n {s.min_workers}, or "
            f"--min-workers {s.workers}"
        )


def _strategy_of(s: Settings) -> Entry:
    from paceline.strategies import find

    return find(s.strategy)


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """
    >>> did_you_mean("slot", ["slots", "seed"])
    "; did you mean 'slots'?"
    """
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near and near[0] != name else ""


def there_are(name: Any, known: Iterable[str], listed: Iterable[str]) -> str:
    """What is there, behind the one that was meant: that is what a reader of a long list looks for.

    >>> there_are("sed", ["slots", "seed"], ["slots (logical workers)", "seed"])
    "; did you mean 'seed'? There are: slots (logical workers), seed"
    """
    near = did_you_mean(name, known)
    return f"{near} There are: {', '.join(listed)}" if near else f"; there are: {', '.join(listed)}"


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Target:
    """A goal for a logged metric: ``accuracy>=0.9``."""

    metric: str
    relation: str
    value: float

    @staticmethod
    def parse(text: str) -> Target:
        match = re.fullmatch(r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*", text)
        try:
            if match:
                return Target(match[1], match[2], float(match[3]))
        except ValueError:
            pass
        raise UsageError(f"--target {text!r} is no goal; write it like accuracy>=0.9 or loss<0.1")

    @property
    def words(self) -> str:
        return f"target {self.metric}{self.relation}{self.value:g}"

    def reached(self, metrics: Mapping[str, float]) -> bool:
        return self.metric in metrics and _OPERATORS[self.relation](metrics[self.metric], self.value)


@dataclass(frozen=True)
class StopRules:
    """When a run ends by itself. Pure: the clock is an argument."""

    steps: int = 0
    seconds: float = 0.0
    target: Target | None = None

    @staticmethod
    def of(settings: Settings) -> StopRules:
        target = Target.parse(settings.target) if settings.target else None
        return StopRules(settings.steps, settings.seconds, target)

    def due(self, step: int, elapsed_s: float, metrics: Mapping[str, float]) -> str | None:
        """Why the run should stop now, or None."""
        if self.steps and step >= self.steps:
            return f"step limit {self.steps} reached"
        if self.seconds and elapsed_s >= self.seconds:
            return f"time limit {self.seconds:g} s reached"
        if self.target and self.target.reached(metrics):
            return f"{self.target.words} reached"
        return None


Origins = dict[str, str]


def merge(flags: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Settings, Origins]:
    """The resolved settings and, for each, its origin: flag, argument, default or derived.

    Flags are checked before a script is started; so with arguments, a mistake is in the script's line.
    """
    try:
        return _merged(flags, arguments)
    except UsageError as error:
        if not arguments:
            raise
        raise UsageError(f"{_script_line()}: {error}") from None


def _script_line() -> str:
    """Where paceline was called from, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "the script"


def _merged(flags: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Settings, Origins]:
    known = {f.name for f in dataclasses.fields(Settings)}
    for name in arguments:
        if name not in known:
            raise UsageError(f"paceline.init() has no setting {name!r}{there_are(name, known, sorted(known))}")
    values = {**{k: v for k, v in arguments.items() if v is not None}, **flags}
    settings = Settings(**values)
    resolved = settings.resolved()
    origins = {}
    for name in (f.name for f in dataclasses.fields(Settings)):
        origins[name] = "flag" if name in flags else "argument" if name in values else "default"
        if getattr(resolved, name) != getattr(settings, name):
            origins[name] = "derived"
    return resolved, origins
