"""Who is in a round of replicas that train apart, and who trains whose shares, where a run goes on without lost ones
(`--on-death drop`). Pure: no clock, no sockets.

A round's deal is a list of the slots that were in it: first those of the replicas that began it, then, for every time that
some were dropped in it, those that were left. A share belongs to its own slot's replica as long as that is in the round;
else it falls to one of those who are. So every share of every step has one replica that trains it, whoever is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

Deal = list[list[int]]


class Here(msgspec.Struct, array_like=True):
    """What a replica says where all come together before an exchange."""

    slot: int
    rounds: int
    term: int
    """The newest that it knows of."""
    waited: bool
    """It has waited for who is missing for as long as it should."""
    deal: Deal


@dataclass(frozen=True)
class Meet:
    """All who should be here are; or somebody is behind, and has to be told."""


@dataclass(frozen=True)
class Enter:
    """Enter this term first: somebody has come, or leaves."""

    term: int


@dataclass(frozen=True)
class Ask:
    """Ask again: not all know of the next term yet."""


@dataclass(frozen=True)
class Follow:
    """Some were dropped in this round while others of it were away: this is its deal."""

    deal: Deal


@dataclass(frozen=True)
class Wait:
    below: bool
    """However long it takes: with fewer the run does not go on."""
    why: str


@dataclass(frozen=True)
class Drop:
    slots: list[int]
    why: str


Decision = Meet | Enter | Ask | Follow | Wait | Drop


def decide(here: Sequence[Here], term: int, least: int) -> Decision:
    """What those who are here do, in this term; a round goes on with `least` replicas or more.

    >>> decide([Here(0, 7, 1, True, [[0, 1, 2]]), Here(2, 7, 1, True, [[0, 1, 2]])], 1, 2)
    Drop(slots=[1], why='replica 1 lost, and not back in time: the run goes on with replicas 0 and 2')
    """
    agreed, known = min(h.term for h in here), max(h.term for h in here)
    if agreed > term:
        return Enter(agreed)
    if known > term:
        return Ask()
    newest = max(h.rounds for h in here)
    if any(h.rounds < newest for h in here):
        return Meet()
    deal = max((h.deal for h in here), key=len)
    if any(h.deal != deal for h in here):
        return Follow(deal)
    there = sorted(h.slot for h in here)
    missing = [slot for slot in deal[-1] if slot not in there]
    if not missing:
        return Meet()
    left = [slot for slot in deal[-1] if slot in there]
    if not left or len(there) < least:
        return Wait(
            True, f"{names(missing)} lost: the run goes on with {least} replicas at least, and waits for another worker"
        )
    if not all(h.waited for h in here):
        return Wait(False, f"{names(missing)} lost, and waited for at an exchange")
    return Drop(missing, f"{names(missing)} lost, and not back in time: the run goes on with {names(there)}")


def names(slots: Sequence[int]) -> str:
    """
    >>> names([1]), names([0, 2, 3])
    ('replica 1', 'replicas 0, 2 and 3')
    """
    if len(slots) == 1:
        return f"replica {slots[0]}"
    return f"replicas {', '.join(map(str, slots[:-1]))} and {slots[-1]}"


def trainer(step: int, slot: int, deal: Deal) -> int:
    """The replica that trains this slot's share of a step. Those of a lost one are spread over the others.

    >>> [trainer(step, 1, [[0, 1, 2], [0, 2]]) for step in range(4)]
    [2, 0, 2, 0]
    """
    who = slot
    for present in deal:
        if who not in present:
            who = present[(step + slot) % len(present)]
    return who


def taken_over(step: int, replica: int, slots: int, deal: Deal) -> list[int]:
    """The slots whose shares of a step this replica trains beside its own."""
    if len(deal[-1]) == slots:
        return []
    return [slot for slot in range(slots) if slot != replica and trainer(step, slot, deal) == replica]


def owed(steps: Iterable[int], replica: int, slots: int, before: Deal, deal: Deal) -> list[tuple[int, int]]:
    """The shares, (step, slot), that have fallen to this replica since it trained these steps by the deal of before."""
    return [
        (step, slot)
        for step in steps
        for slot in range(slots)
        if trainer(step, slot, deal) == replica != trainer(step, slot, before)
    ]
