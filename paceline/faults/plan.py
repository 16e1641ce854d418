"""What goes wrong on purpose, whom it hits, and when. Pure: words and numbers in, actions out.

    kill worker:2 @step 120             SIGKILL, as from an out-of-memory killer
    freeze worker:1 @step 200 for 10s   SIGSTOP, and SIGCONT after that time
    cut worker:3 @step 300 for 8s       nobody reaches it, it reaches nobody
    slow worker:0 x4                    its computing takes four times as long
    kill server:1 @step 120             a process that holds parameters
    kill coordinator @time 20s          the leading agent

`Fault` is one such line, `Plan` says what to do now. A plan outlives its carrier: the leading agent may
be the one that is hit, and the next leader goes on from `Plan.state()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from paceline.errors import UsageError

Kind = Literal["kill", "freeze", "cut", "slow"]
Role = Literal["worker", "server", "main", "coordinator", "standby", "nursery", "everything"]
Deed = Literal["kill", "stop", "continue", "cut", "mend", "slow", "unslow", "pass"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES: tuple[Role, ...] = get_args(Role)
NUMBERED: tuple[Role, ...] = ("worker", "server")
"""Of which there are several, told apart by a number."""

HITS: dict[Kind, tuple[Role, ...]] = {
    "kill": ROLES,
    "freeze": ROLES,
    "cut": ("worker", "main", "coordinator", "standby"),
    "slow": ("worker", "main"),
}
"""Whom a kind can hit: only what speaks to others can be cut off, only what trains can be slowed."""

_ROLE_WORDS = ", ".join(f"{role}:K" if role in NUMBERED else role for role in ROLES)
_BEGINS: dict[Kind, Deed] = {"kill": "kill", "freeze": "stop", "cut": "cut", "slow": "slow"}
_ENDS: dict[Kind, Deed] = {"freeze": "continue", "cut": "mend", "slow": "unslow"}
_CARRIERS: tuple[Role, ...] = ("coordinator", "everything")
"""Who carries a plan out is hit by a fault of these."""

_NUMBER = r"\d{1,9}(?:\.\d{1,3})?"
_FORM = re.compile(
    r"(?P<kind>[a-z]+) +(?P<target>[a-z]+)(?::(?P<number>\d{1,9}))?"
    rf"(?: +x(?P<factor>{_NUMBER}))?"
    rf"(?: +@(?:step +(?P<step>\d{{1,9}})|time +(?P<time>{_NUMBER})s))?"
    rf"(?: +for +(?P<for>{_NUMBER})s)?"
)
_EXAMPLES: dict[str, str] = {
    "kill": "kill worker:2 @step 120",
    "freeze": "freeze worker:1 @step 200 for 10s",
    "cut": "cut worker:3 @time 20s for 8s",
    "slow": "slow worker:0 x4",
}


@dataclass(frozen=True)
class Fault:
    kind: Kind
    role: Role
    number: int | None = None
    """Which one, where the role is worker or server."""
    step: int | None = None
    time_s: float | None = None
    """Since the run's start. Neither this nor a step: from the start."""
    for_s: float | None = None
    """None: for good."""
    factor: float | None = None
    """How much slower."""

    @staticmethod
    def parse(text: str) -> Fault:
        """
        >>> Fault.parse("freeze  main @step 200 for 10.0s")
        Fault(kind='freeze', role='main', number=None, step=200, time_s=None, for_s=10.0, factor=None)
        >>> str(Fault.parse("freeze  main @step 200 for 10.0s"))
        'freeze main @step 200 for 10s'
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            kind = next((kind for kind in KINDS if text.strip().startswith(kind)), None)
            example = f"'{_EXAMPLES[kind]}'" if kind else f"'{_EXAMPLES['kill']}' or '{_EXAMPLES['freeze']}'"
            raise UsageError(f"--fault {text!r}: say what, whom and when, such as {example}")
        if found["kind"] not in KINDS:
            _refuse(text, f"{found['kind']!r} is none of {', '.join(KINDS)}", "kill")
        if found["target"] not in ROLES:
            _refuse(text, f"{found['target']!r} is none of {_ROLE_WORDS}", found["kind"])
        fault = Fault(
            cast(Kind, found["kind"]),
            cast(Role, found["target"]),
            None if found["number"] is None else int(found["number"]),
            None if found["step"] is None else int(found["step"]),
            _seconds(found["time"]),
            _seconds(found["for"]),
            _seconds(found["factor"]),
        )
        wrong = fault._wrong()
        if wrong:
            _refuse(text, wrong, fault.kind)
        return fault

    def _wrong(self) -> str:
        """What does not go together, in words; or nothing."""
        if (self.role in NUMBERED) != (self.number is not None):
            return f"which {self.role}?" if self.number is None else f"only a {' or a '.join(NUMBERED)} has a number"
        if self.role not in HITS[self.kind]:
            return f"{self.kind} hits one of {', '.join(HITS[self.kind])}"
        if self.kind == "slow" and (self.factor is None or self.factor <= 1):
            return "slow needs a factor above 1, such as x4"
        if self.kind != "slow" and self.factor is not None:
            return f"only slow has a factor, not {self.kind}"
        if self.kind != "slow" and self.step is None and self.time_s is None:
            return "when? add @step N or @time Ns"
        if self.kind == "kill" and self.for_s is not None:
            return "a kill is for good, without 'for'"
        if self.kind in ("freeze", "cut") and self.for_s is None:
            return f"for how long? a {self.kind} ends, add 'for Ns'"
        return "'for 0s' would end before it began" if self.for_s == 0 else ""

    @property
    def target(self) -> str:
        return self.role if self.number is None else f"{self.role}:{self.number}"

    def __str__(self) -> str:
        words = [self.kind, self.target]
        words += [] if self.factor is None else [f"x{_short(self.factor)}"]
        words += [] if self.step is None else [f"@step {self.step}"]
        words += [] if self.time_s is None else [f"@time {_short(self.time_s)}s"]
        words += [] if self.for_s is None else [f"for {_short(self.for_s)}s"]
        return " ".join(words)

    def reached(self, step: int, seconds: float) -> bool:
        if self.step is not None:
            return step >= self.step
        return seconds >= (self.time_s or 0.0)


def _refuse(text: str, why: str, kind: str) -> NoReturn:
    raise UsageError(f"--fault {text!r}: {why}; such as '{_EXAMPLES[kind]}'")


def _seconds(text: str | None) -> float | None:
    return None if text is None else float(text)


def _short(number: float) -> str:
    """
    >>> _short(10.0), _short(0.25)
    ('10', '0.25')
    """
    return f"{number:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Action:
    """One thing to do now. Every end (continue, mend, unslow) may be done twice without harm."""

    kind: Deed
    """A "pass" is only to be told: whom the fault was for is gone."""
    role: Role
    """Never "main": that is a worker by the time it is hit."""
    number: int | None
    factor: float | None
    for_s: float | None
    """How long it will last, for whoever stops itself and needs somebody to wake it."""
    why: str
    """The fault, as the user wrote it, and what became of it."""


@dataclass
class _Course:
    """How far one fault has come."""

    fault: str
    began_s: float | None = None
    number: int | None = None
    """Who was hit: the end must find the same one, whoever is main by then."""
    done: bool = False


class Plan:
    """
    >>> plan = Plan([Fault.parse("freeze main @step 5 for 2s")])
    >>> plan.due(step=4, seconds=1.0, members=[0, 1])
    []
    >>> [(action.kind, action.number) for action in plan.due(step=5, seconds=1.2, members=[0, 1])]
    [('stop', 0)]
    >>> [(action.kind, action.number) for action in plan.due(step=5, seconds=3.3, members=[1])]
    [('continue', 0)]
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._courses = [_Course(str(fault)) for fault in faults]
        self._highest = dict.fromkeys(NUMBERED, -1)
        """The highest number of each role seen so far: numbers only grow, so one above it is yet to come."""
        self._read()

    def _read(self) -> None:
        self._faults = [Fault.parse(course.fault) for course in self._courses]

    def state(self) -> dict[str, Any]:
        """Everything as plain JSON. Written down after `due` and before its actions are carried out:
        a leader that is killed by its own plan must not leave the same kill to the next one."""
        return {"courses": [asdict(course) for course in self._courses], "highest": dict(self._highest)}

    @staticmethod
    def restore(state: dict[str, Any]) -> Plan:
        plan = Plan([])
        plan._courses = [_Course(**course) for course in state["courses"]]
        plan._highest = dict(state["highest"])
        plan._read()
        return plan

    def missed(self, step: int, seconds: float) -> list[str]:
        """What has not happened, as the user wrote it, and why, in a run that was over at this step and time."""
        found = []
        for fault, course in zip(self._faults, self._courses, strict=True):
            if course.began_s is None and not course.done:
                why = f"the run was over at step {step}"
                if fault.number is not None and fault.number > self._highest[fault.role]:
                    why = f"there was no {fault.role} {fault.number}" if fault.reached(step, seconds) else why
                found.append(f"the fault '{fault}' never came: {why}")
        return found

    @property
    def over(self) -> bool:
        """Nothing will ever be due again."""
        return all(course.done for course in self._courses)

    def due(self, step: int, seconds: float, members: Sequence[int], servers: Sequence[int] = ()) -> list[Action]:
        """What to do now, in this order; each is counted as done.

        `step`: how many steps some member has committed. `seconds`: since the run's start, also after
        a change of leader. `members`: the numbers of the workers in the run, main's first.
        `servers`: the numbers of the servers that are there.

        Of the faults that hit whoever carries them out at most one is given, and last: what came
        after it would be lost.
        """
        there: dict[Role, Sequence[int]] = {"worker": members, "server": servers}
        for role, numbers in there.items():
            self._highest[role] = max([self._highest[role], *numbers])
        pairs = list(zip(self._faults, self._courses, strict=True))
        actions = [_end(fault, course) for fault, course in pairs if _ends(fault, course, seconds)]
        own: list[Action] = []
        for fault, course in pairs:
            waits = course.began_s is None and not course.done
            if not waits or not fault.reached(step, seconds) or self._to_come(fault, members):
                continue
            if fault.role not in _CARRIERS:
                actions.append(_begin(fault, course, seconds, there))
            elif not own:
                own.append(_begin(fault, course, seconds, there))
        return actions + own

    def _to_come(self, fault: Fault, members: Sequence[int]) -> bool:
        """Whether a fault that is due must wait for whom it hits."""
        if fault.role == "main":
            return not members
        return fault.number is not None and fault.number > self._highest[fault.role]


def _begin(fault: Fault, course: _Course, seconds: float, there: Mapping[Role, Sequence[int]]) -> Action:
    if fault.number is not None and fault.number not in there[fault.role]:
        course.done = True
        why = f"{fault}: passed over, {fault.role} {fault.number} is gone"
        return Action("pass", fault.role, fault.number, None, None, why)
    course.began_s, course.done = seconds, fault.for_s is None
    course.number = there["worker"][0] if fault.role == "main" else fault.number
    return _action(_BEGINS[fault.kind], fault, course, str(fault))


def _ends(fault: Fault, course: _Course, seconds: float) -> bool:
    if course.done or course.began_s is None or fault.for_s is None:
        return False
    return seconds >= course.began_s + fault.for_s


def _end(fault: Fault, course: _Course) -> Action:
    course.done = True
    return _action(_ENDS[fault.kind], fault, course, f"{fault}: its time is over")


def _action(deed: Deed, fault: Fault, course: _Course, why: str) -> Action:
    role: Role = "worker" if fault.role == "main" else fault.role
    return Action(deed, role, course.number, fault.factor, fault.for_s, why)
