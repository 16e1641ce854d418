"""What the processes of a run say to its leading agent, and what it answers. No torch in here."""

from __future__ import annotations

import msgspec

from paceline.wires.board import Stop as Asked
from paceline.wires.wire import decoder

# a worker


class Hello(msgspec.Struct, tag=True):
    """A worker's first message to a leader; the answer is `Welcome`, with the board's descriptor."""

    worker: int
    pid: int


class Welcome(msgspec.Struct, tag=True):
    rows: int
    """Rows of the board: as many workers as there may ever be."""
    term: int
    members: list[int]
    """The view of the run. A worker that is not in it comes to join."""
    homes: list[int]
    """The machine of each of them."""
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


class Needed(msgspec.Struct, tag=True):
    """The same, where it heals while the others train: answered by the `Next` view that is settled, whose members
    have the run's state, once it is needed."""


class Claim(msgspec.Struct, tag=True):
    """On several machines: this worker wants to train one of these slots' replicas, the first that nobody has. The answer is its
    number, or an empty `Value` if there is none now."""

    slots: list[int]


class CaughtUp(msgspec.Struct, tag=True):
    """A newcomer has the run's state, and follows: it can be let in."""


class Healed(msgspec.Struct, tag=True):
    """A newcomer has the run's state: its view is in force."""


class Next(msgspec.Struct, tag=True):
    """A view: an answer."""

    term: int
    members: list[int]
    homes: list[int]
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
    step: int = -1
    """Where in the training an exception came up; -1: not there, or not one that others may be spared."""
    slot: int = -1


# servers


class ServerReady(msgspec.Struct, tag=True):
    """A server listens here, ready to hold fragments."""

    near: str
    """For processes of its own machine."""
    far: str = ""
    """For those of others."""


class Sizes(msgspec.Struct, tag=True):
    """How large each fragment is of what servers shall hold in a room; answered when it is written down."""

    nbytes: list[int]
    room: str = "parameters"


class Filled(msgspec.Struct, tag=True):
    """A primary has given another server all there is of these fragments."""

    server: int
    since: dict[int, int]
    """Of each of them, the layout by which that server came to hold it."""


class GoBack(msgspec.Struct, tag=True):
    """Something that the run's next step needs is lost: all begin again at the newest checkpoint. Answered with Done; whoever says
    so is ended."""

    why: str


class RolledBack(msgspec.Struct, tag=True):
    """A run that has lost its parameters goes on at this step; 0: there was no checkpoint."""

    step: int


class Layout(msgspec.Struct, tag=True):
    """The layout that follows this one: answered once there is one."""

    after: int


class Placed(msgspec.Struct, tag=True):
    """Which server holds what."""

    number: int
    holders: list[list[int]]
    """Of each fragment: the primary first."""
    since: list[list[int]]
    """Of each of these, the layout by which it came to hold the fragment: what it had of it before is worth nothing."""
    filled: list[list[int]]
    """Of each fragment: the backups that hold all of it."""
    addresses: dict[int, str]
    """Where whoever has asked reaches each server."""
    rooms: dict[str, tuple[int, int]] = {}
    """What the fragments are of: the first one's number, and how many."""

    def of(self, room: str) -> Placed:
        """The layout of one room, whose fragments are numbered by themselves there."""
        first, count = self.rooms.get(room, (0, 0))
        mine = slice(first, first + count)
        return Placed(self.number, self.holders[mine], self.since[mine], self.filled[mine], self.addresses)


class Done(msgspec.Struct, tag=True):
    """An empty answer."""


class Refused(msgspec.Struct, tag=True):
    why: str


# a standby agent


class Shadow(msgspec.Struct, tag=True):
    """A standby's first message: send what must outlive the leader."""

    pid: int


class Keep(msgspec.Struct, tag=True):
    """A descriptor to hold on to: the board, a segment of shared memory, a worker's pidfd."""

    name: str
    size: int = 0


class Release(msgspec.Struct, tag=True):
    name: str


# whoever watches or steers


class Watch(msgspec.Struct, tag=True):
    """Answered by `Welcome` with the board; `Members` and `Ended` follow."""


class Members(msgspec.Struct, tag=True):
    """The workers that train now; the first is main."""

    members: list[int]


class Ended(msgspec.Struct, tag=True):
    """The run is over."""

    exit_code: int


class Steer(msgspec.Struct, tag=True):
    """Whoever wants to say one of the following; answered by `Done`."""


class Stop(msgspec.Struct, tag=True):
    """Stop after this step (with a checkpoint, if the run writes them), or kill all at once."""

    who: Asked
    kill: bool = False


class Scale(msgspec.Struct, tag=True):
    """Train with so many workers and servers from now on; None: as it is."""

    workers: int | None = None
    servers: int | None = None


Message = (
    Hello | Welcome | Ready | Needed | Claim | CaughtUp | Healed | Next | After | Entering | Segment | Granted | Put | Get | Value | Failed
    | ServerReady | Sizes | Filled | GoBack | RolledBack | Layout | Placed | Done | Refused | Shadow | Keep | Release | Watch | Members | Ended | Steer | Stop | Scale
)  # fmt: skip
ANY = decoder(Message)
"""Reads any of them."""
