"""Which deaths a run survives as it is set up, in one line. Pure."""

from __future__ import annotations

from paceline.settings import Settings


def words(transport: str, settings: Settings, machine: str) -> str:
    """`transport` is how tensors move, `machine` the name of the one on which the run was started.

    >>> words("shm", Settings(checkpoint_every=100), "node-1")
    'any process of this run may die; if the machine does, `paceline resume` goes on from a checkpoint'
    """
    if settings.store:
        first = "any process and any machine of this run may die; if all do,"
    elif settings.listen:
        first = (
            f"any process of this run may die, and any machine but {machine}: the run ends if {machine} dies "
            "(give --store etcd://…); then"
        )
    elif transport == "shm":
        first = "any process of this run may die; if the machine does,"
    else:
        first = (
            f"the run ends if a worker dies ({transport}; --transport shm outlives that); then, or if the machine does,"
        )
    if settings.checkpoint_every:
        return f"{first} `paceline resume` goes on from a checkpoint"
    return f"{first} it is lost: give --checkpoint-every N"
