"""Fault plans drawn by a seed: all kinds and roles, but none that nobody could survive. Pure.

What is left out: a plan that takes every worker away, one that takes the leading agent and its standby,
one that takes a second server (before the first one's copies are made good again that may be both copies),
and anything behind a kill of everything, which only `paceline resume` survives.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.faults.plan import HITS, KINDS, ROLES, Fault, Kind, Role

_AGENTS: tuple[Role, ...] = ("coordinator", "standby")
_TRAIN: tuple[Role, ...] = ("worker", "main")
_OFTEN: dict[Role, int] = {
    "worker": 4,
    "server": 4,
    "main": 2,
    "coordinator": 2,
    "standby": 1,
    "nursery": 1,
    "everything": 1,
}
_LONGEST_S = 8.0
"""Long enough for a frozen or cut worker to be given up; most are shorter, and it just comes back."""


@dataclass(frozen=True)
class Range:
    """What a clean run was like: faults are laid into it."""

    steps: int
    seconds: float
    workers: int
    servers: int = 0
    replicas: int = 1
    """Copies of what a server holds."""


def random_plan(
    seed: int, within: Range, kinds: Collection[Kind] = KINDS, roles: Collection[Role] = ROLES, most: int = 4
) -> list[Fault]:
    """
    >>> [str(fault) for fault in random_plan(1, Range(800, 5.0, 4), ["kill"], ["worker"], most=2)]
    ['kill worker:0 @step 33', 'kill worker:0 @step 653']
    """
    draw = random.Random(f"paceline faults {seed}")
    faults: list[Fault] = []
    for _ in range(draw.randint(1, most)):
        choices = [
            (kind, role) for kind in KINDS for role in ROLES
            if kind in kinds and role in roles and role in HITS[kind] and _bearable(kind, role, faults, within)
        ]  # fmt: skip
        if choices:
            open_to = sorted({role for _, role in choices})
            (role,) = draw.choices(open_to, [_OFTEN[role] for role in open_to])
            kind = draw.choice([kind for kind, of in choices if of == role])
            faults.append(_drawn(draw, kind, role, within))
    last = [fault for fault in faults if kills_everything(fault)]
    return [fault for fault in faults if fault not in last] + last


def kills_everything(fault: Fault) -> bool:
    return (fault.kind, fault.role) == ("kill", "everything")


def _bearable(kind: Kind, role: Role, so_far: list[Fault], within: Range) -> bool:
    """Whether a run can survive this too. A replacement may come too late to count on it."""
    if role in _TRAIN:
        taken = sum(fault.role in _TRAIN and fault.kind != "slow" for fault in so_far)
        return kind == "slow" or taken < within.workers - 1
    if role == "server":
        copied = min(within.servers, within.replicas) >= 2
        return copied and not any(fault.role == "server" for fault in so_far)
    if role in _AGENTS:
        return not any(fault.role in _AGENTS for fault in so_far)
    return role == "nursery" or not any(fault.role == "everything" for fault in so_far)


def _drawn(draw: random.Random, kind: Kind, role: Role, within: Range) -> Fault:
    of_role = {"worker": within.workers, "server": within.servers}.get(role)
    fault = Fault(kind, role, draw.randrange(of_role) if of_role else None)
    if kind == "slow":
        fault = replace(fault, factor=draw.randint(15, 60) / 10)
    if kind != "kill":
        fault = replace(fault, for_s=round(min(0.2 + draw.expovariate(0.5), _LONGEST_S), 1))
    if kills_everything(fault):
        # Late enough for a checkpoint to be there, and behind what else the plan has.
        return replace(fault, step=draw.randint(within.steps * 6 // 10, within.steps * 9 // 10))
    if draw.random() < 0.25:
        return replace(fault, time_s=round(draw.uniform(0.1, within.seconds), 1))
    return replace(fault, step=draw.randint(0, within.steps * 9 // 10))
