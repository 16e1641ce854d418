"""What a worker and its agent say to each other. No torch in here."""

from __future__ import annotations

import msgspec

from paceline.cluster.wire import decoder


class Hello(msgspec.Struct, tag=True):
    """A worker's first message; the answer is `Welcome`, with the board's descriptor."""

    worker: int
    pid: int


class Welcome(msgspec.Struct, tag=True):
    rows: int
    """Rows of the board: as many workers as there may ever be."""
    term: int
    members: list[int]
    """The view of the run. A worker that is not in it comes to join."""
    deaths: int
    """Workers lost so far."""


class Segment(msgspec.Struct, tag=True):
    """Shared memory of this name and size: made by the first who asks, the same for all."""

    name: str
    size: int


class Granted(msgspec.Struct, tag=True):
    size: int


class Put(msgspec.Struct, tag=True):
    """A fact for the other workers (an address, say)."""

    key: str
    value: str


class Get(msgspec.Struct, tag=True):
    """Answered once somebody has put the key."""

    key: str


class Value(msgspec.Struct, tag=True):
    value: str


class Ready(msgspec.Struct, tag=True):
    """A newcomer has come as far as the loop; answered by the `Next` view it is in."""

    worker: int


class Healed(msgspec.Struct, tag=True):
    """A newcomer has the run's state: its view is in force."""

    worker: int


class Next(msgspec.Struct, tag=True):
    """A view: an answer."""

    term: int
    members: list[int]
    deaths: int


class After(msgspec.Struct, tag=True):
    """The view that follows a death in this term; answered once it is known."""

    term: int


class Entering(msgspec.Struct, tag=True):
    """The view of this term, which was announced."""

    term: int


class Failed(msgspec.Struct, tag=True):
    """This worker ends because of an error."""

    summary: str
    traceback: str
    exit_code: int
    follows: bool
    """True when the cause lies elsewhere: another worker was lost, and this one only noticed."""


class Notice(msgspec.Struct, tag=True):
    """A line for the terminal that is not the script's own output."""

    text: str


class Done(msgspec.Struct, tag=True):
    """An empty answer."""


class Refused(msgspec.Struct, tag=True):
    why: str


Message = (
    Hello | Welcome | Ready | Healed | Next | After | Entering | Segment | Granted | Put | Get | Value | Failed | Notice
    | Done | Refused
)  # fmt: skip

ANY = decoder(Message)
"""Reads any of them."""
