"""When replicas that train apart meet, and what becomes of their weights then. Pure, and without torch.

gossip:4                      every 4 steps each takes the mean with one other; gossip alone: after each
local:20                      every 20 steps all take the mean of their weights
postlocal:500,20              in the first 500 steps after each one, then every 20
diloco:50                     every 50 steps an outer optimizer takes the mean difference for a gradient
diloco:50,outer=adam,lr=0.01  another one, or other values (see `outer`)
streaming:50,4                the same in 4 fragments, each at steps of its own; what becomes of one comes in 5 steps
                              later, and is mixed half and half with what was trained meanwhile
streaming:50,4,overlap=0,mix=0     it comes in at once, and as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.servers.outer import SGD, AnyOuter, make

_NUMBERS = {
    "gossip": ("H",),
    "local": ("H",),
    "postlocal": ("first", "H"),
    "diloco": ("H",),
    "streaming": ("H", "fragments"),
}
_EXAMPLES = {
    "gossip": "gossip or gossip:4",
    "local": "local:20",
    "postlocal": "postlocal:500,20",
    "diloco": "diloco or diloco:50,lr=0.7,momentum=0.9",
    "streaming": "streaming:50,4 or streaming:50,4,overlap=2,mix=0.5",
}
_USUAL = {"gossip": "gossip:1", "diloco": "diloco:50"}
"""What a bare name stands for."""
_OVERLAP, _MIX = 5, 0.5


@dataclass(frozen=True)
class Rhythm:
    every: int
    """Steps between two exchanges of the same weights."""
    outer: AnyOuter
    first: int = 0
    """Before this step they are exchanged after each one."""
    fragments: int = 1
    overlap: int = 0
    """Steps between the moment whose weights are exchanged, and that at which the result comes in."""
    mix: float = 0.0
    """What the own weights count for when it does."""

    def gives(self, step: int) -> int | None:
        """Which fragment is given to the others once so many steps are done, if any is.

        >>> [Rhythm(5, SGD(), fragments=2).gives(step) for step in range(1, 11)]
        [None, 0, None, None, 1, None, 0, None, None, 1]
        >>> [Rhythm(3, SGD(), first=2).gives(step) for step in range(1, 9)]
        [0, 0, None, None, 0, None, None, 0]
        """
        if step <= self.first:
            return 0
        phase = (step - self.first - 1) % self.every + 1
        fragment = -(-phase * self.fragments // self.every) - 1
        return fragment if phase == (fragment + 1) * self.every // self.fragments else None

    def takes(self, step: int) -> bool:
        """Whether what was given last comes in now.

        >>> [Rhythm(4, SGD(), fragments=2, overlap=1).takes(step) for step in range(1, 8)]
        [False, False, True, False, True, False, True]
        """
        return step > self.overlap and self.gives(step - self.overlap) is not None

    def meets_within(self, step: int, steps: int) -> bool:
        """Whether something that is given behind this step comes in before so many more are done.

        >>> [Rhythm(4, SGD()).meets_within(10, steps) for steps in (2, 3)]
        [False, True]
        >>> [Rhythm(4, SGD(), overlap=1).meets_within(8, steps) for steps in (5, 6)]
        [False, True]
        """
        return any(self.takes(later) for later in range(step + self.overlap + 1, step + steps))


def parse(text: str) -> Rhythm:
    """
    >>> parse("local:20")
    Rhythm(every=20, outer=SGD(lr=1.0, momentum=0.0), first=0, fragments=1, overlap=0, mix=0.0)
    >>> parse("streaming:4,5")
    Traceback (most recent call last):
    paceline.errors.UsageError: --strategy streaming:4,5: 5 fragments in 4 steps: there is one a step at most; write streaming:4,4
    """
    name, _, rest = _USUAL.get(text, text).partition(":")
    numbers, options = _read(text, name, [part for part in rest.split(",") if part])
    first, every, fragments = numbers.get("first", 0), numbers["H"], numbers.get("fragments", 1)
    window, streams = every // fragments, name == "streaming"
    if not window:
        raise UsageError(
            f"--strategy {text}: {fragments} fragments in {every} steps: there is one a step at most; write {name}:{every},{every}"
        )
    overlap = options.pop("overlap", min(_OVERLAP, window - 1)) if streams else 0
    mix = options.pop("mix", _MIX if overlap else 0.0) if streams else 0.0
    if not (isinstance(overlap, int) and 0 <= overlap < window):
        raise UsageError(
            f"--strategy {text}: overlap is a number of steps below {window}, so that one exchange is over when the next begins"
        )
    if not (isinstance(mix, int | float) and 0 <= mix < 1):
        raise UsageError(f"--strategy {text}: mix is what the own weights count for, from 0 to below 1")
    return Rhythm(every, _outer(text, name, options, every), first, fragments, overlap, float(mix))


def _read(text: str, name: str, parts: Sequence[str]) -> tuple[dict[str, int], dict[str, int | float | str]]:
    wanted = _NUMBERS[name]
    if text == name and not parts:
        usual = _EXAMPLES[name].partition(" or ")[0]
        raise UsageError(f"--strategy {text}: for the steps between two exchanges there is no default; write {usual}")
    wrong = UsageError(f"--strategy {text}: write it like {_EXAMPLES[name]}")
    if len(parts) < len(wanted) or not all(part.isdecimal() for part in parts[: len(wanted)]):
        raise wrong
    numbers = {key: int(part) for key, part in zip(wanted, parts, strict=False)}
    if min(numbers[key] for key in wanted if key != "first") < 1:
        raise wrong
    options: dict[str, int | float | str] = {}
    for part in parts[len(wanted) :]:
        key, equals, value = part.partition("=")
        if not equals or key in options:
            raise wrong
        options[key] = _value(value)
    return numbers, options


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _outer(text: str, name: str, options: dict[str, int | float | str], every: int) -> AnyOuter:
    averaging = name in ("gossip", "local", "postlocal")
    if averaging and options:
        near = _with_outer(every, options) or text.partition(f",{next(iter(options))}=")[0]
        raise UsageError(f"--strategy {text}: {name} takes the mean, and has no {next(iter(options))}; write {near}")
    if averaging:
        return SGD()
    kind = options.pop("outer", "nesterov")
    values = {key: value for key, value in options.items() if isinstance(value, int | float)}
    if not isinstance(kind, str) or len(values) < len(options):
        raise UsageError(f"--strategy {text}: write it like {_EXAMPLES[name]}")
    try:
        return make(kind, **values)
    except UsageError as error:
        raise UsageError(f"--strategy {text}: {error}") from None


def _with_outer(every: int, options: dict[str, int | float | str]) -> str:
    """diloco with these numbers, if it takes them."""
    text = ",".join([f"diloco:{every}", *(f"{key}={value}" for key, value in options.items())])
    try:
        parse(text)
    except UsageError:
        return ""
    return text
