"""What the agents of a run's machines say to each other, over TCP. No torch in here.

A machine's agent reports its whole state each time, and is told the whole journal: whoever leads next
misses nothing, and everything can be said twice.
"""

from __future__ import annotations

import msgspec

from paceline.cluster.journal import End
from paceline.wires.wire import decoder

# from another machine's agent to the one that leads


class Inquire(msgspec.Struct, tag=True):
    """What is to be run? Answered by `Described`, and the machine has a number from then on."""

    identity: str
    """The machine's own, made up when its first agent started."""
    name: str
    places: int
    """How many workers it may have; 0: its share of the workers."""


class Join(msgspec.Struct, tag=True):
    """An agent's first message: it speaks for this machine now. Answered by `Told`."""

    identity: str
    going: bool = False
    """The machine was told to go: nobody is to be started there."""


class Report(msgspec.Struct, tag=True):
    """How it stands on this machine; said whenever something has changed, and at every tick."""

    pids: dict[int, int]
    """Workers that run."""
    exits: dict[int, End]
    """Workers that have ended, as long as the journal does not say so."""
    leaving: list[int]
    """Workers that were told to go."""
    going: bool
    """The whole machine was told to go."""
    main_ready: bool
    rows: dict[int, bytes]
    """The board's rows of the workers that run, and the last ones of those that have ended."""


class Ask(msgspec.Struct, tag=True):
    """Something that a worker (or -1, somebody at a terminal) said that is the coordinator's to decide."""

    number: int
    worker: int
    message: msgspec.Raw


# from the one that leads


class Described(msgspec.Struct, tag=True):
    """What is to be run, and the machine's number in it."""

    machine: int
    run: str
    job: bytes
    store: str
    """The run's name in the store that all machines share; nothing, if there is none."""


class Told(msgspec.Struct, tag=True):
    """The run's journal, under this fence; nothing of it, if only to be heard."""

    fence: int
    journal: bytes = b""


class Reply(msgspec.Struct, tag=True):
    """The answer to the `Ask` of this number."""

    number: int
    message: msgspec.Raw


class Hit(msgspec.Struct, tag=True):
    """Send this signal to a worker."""

    worker: int
    signum: int


class TurnedAway(msgspec.Struct, tag=True):
    """This machine has no business here."""

    why: str


TO_LEADER = decoder(Inquire | Join | Report | Ask)
FROM_LEADER = decoder(Described | Told | Reply | Hit | TurnedAway)
