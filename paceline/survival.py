"""Which deaths a run survives as it is set up, in one line. Pure."""

from __future__ import annotations


def words(transport: str, checkpoint_every: int) -> str:
    """
    >>> words("shm", 100)
    'any process of this run may die; if the machine does, `paceline resume` goes on from a checkpoint'
    """
    if transport == "shm":
        first = "any process of this run may die; if the machine does,"
    else:
        first = (
            f"the run ends if a worker dies ({transport}; --transport shm outlives that); then, or if the machine does,"
        )
    if checkpoint_every:
        return f"{first} `paceline resume` goes on from a checkpoint"
    return f"{first} it is lost: give --checkpoint-every N"
