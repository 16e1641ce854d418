"""Where the states of replicas that train apart lie on several machines, and which of them count. Pure.

What a replica leaves behind an exchange lies on its own machine, and a copy on that machine's *buddy*: the next one that
lives. No replica has its next exchange before the copy is there. So whichever machine is lost, each of its replicas is on
another one as it was behind the last exchange that all have had, or behind the one before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.errors import PacelineError

NONE = -1
"""The round of a state that is not there."""


def buddy(machine: int, machines: Collection[int]) -> int | None:
    """The machine that has the copies of what lies on this one, among those that have workers; None: there is no other.

    >>> buddy(1, [0, 1, 3]), buddy(3, [0, 1, 3]), buddy(2, [0, 1, 3]), buddy(0, [0])
    (3, 0, 3, None)
    """
    others = sorted({*machines} - {machine})
    return next((other for other in others if other > machine), others[0] if others else None)


def keeper(slot: int, machine: int, homes: Mapping[int, int]) -> int | None:
    """Which worker takes in the copies of a slot's replica that trains on this machine: of the buddy's, not one all of them.

    >>> keeper(0, 0, {4: 0, 5: 1, 6: 1}), keeper(1, 0, {4: 0, 5: 1, 6: 1}), keeper(0, 0, {4: 0})
    (5, 6, None)
    """
    there = buddy(machine, homes.values())
    members = sorted(worker for worker, home in homes.items() if home == there)
    return members[slot % len(members)] if members else None


def newest(found: Mapping[int, Sequence[int]], slot: int, here: int) -> tuple[int, int]:
    """The machine on which a slot's newest state lies, rather this one, and its round; of what lies on each: by slot, the round
    at whose end its state was taken.

    >>> newest({0: [4, 3], 1: [4, NONE]}, slot=0, here=1), newest({0: [4, 3], 1: [4, NONE]}, slot=1, here=1)
    ((1, 4), (0, 3))
    """
    machine = max(found, key=lambda machine: (found[machine][slot], machine == here, -machine))
    return machine, found[machine][slot]


def foremost(found: Mapping[int, Sequence[int]]) -> int:
    """How many exchanges the run has had, by what lies there.

    >>> foremost({0: [4, 3], 1: [4, NONE]})
    4
    """
    return max(max(rounds) for rounds in found.values())


def lost_for_good(slot: int, left: str, latest: int) -> PacelineError:
    """`left`: which of its states is."""
    return PacelineError(
        f"replica {slot} was lost: its newest state that is left is {left}, and the others have had exchange "
        f"{latest}. With --state-copies one machine may be lost at a time, and its replicas' states are on "
        "another one. Go on from a checkpoint, if there is one (`paceline resume`)"
    )
