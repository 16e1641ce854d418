"""What workers say to a server, servers to each other, and what is answered.

A call has a body where `+ bytes` stands: of all its fragments, one behind the other. All calls can be said twice: a
server that has done what is said does nothing. Workers say by which layout they think that the server is the
fragments' primary.
"""

from __future__ import annotations

import msgspec

from paceline.servers.carried import Carried, Values
from paceline.servers.coding import Coding
from paceline.servers.fragments import Fragment
from paceline.servers.keys_messages import KeyCall, KeySaid
from paceline.servers.kv import Pulled, Pushed
from paceline.servers.outer import AnyOuter
from paceline.servers.register import Counted, Delivered, Receipt
from paceline.servers.rounds import Closed
from paceline.servers.row_optimizers import RowOptimizer
from paceline.servers.tables import Table


class Centre(msgspec.Struct, frozen=True):
    """Where clients train apart: when a round counts, and what comes of it. See `rounds.Rounds`."""

    quorum: int
    grace_s: float
    outer: AnyOuter


class Drawing(msgspec.Struct):
    """What is trained."""

    fragments: list[Fragment]
    flats: list[str]
    """The dtype of each flat of the layout."""
    optimizers: list[Carried]
    mode: str = "ps"
    """How workers keep in step, as it is written for --strategy."""
    slots: int = 0
    """Where they do so at their own pace: there is a register then, behind the last fragment."""
    tables: list[Table] = []
    """Their fragments are numbered behind all that: those of the first table, of the second, …"""
    centre: Centre | None = None
    coding: Coding | None = None
    """How gradients may come."""

    @property
    def first_row_fragment(self) -> int:
        return len(self.fragments) + bool(self.slots)


class Outline(msgspec.Struct, tag=True):
    """Before anything else + an encoded `Drawing`."""


class Lay(msgspec.Struct, tag=True):
    """Hold this one fragment + its values, then the state of its optimizers as a snapshot (of rows, the snapshot alone)."""

    fragments: list[int]
    version: int


class Part(msgspec.Struct, tag=True):
    """The sum over a subtree of the shares at a reduce point + bytes, or excerpts of its message (see `coding`)."""

    step: int
    call: int
    leaves: int
    a: int
    b: int
    fragments: list[int]
    lanes: bytes = b""
    """Where shares travel by themselves: what is agreed on beside the sum, of the first fragment's part alone."""
    coded: list[int] = []
    """The fragments that the body is cut for, if it is excerpts."""


class Sealed(msgspec.Struct, tag=True):
    """Whether the sums of all these fragments are complete; waits for it, if told so."""

    step: int
    call: int
    fragments: list[int]
    wait: bool


# where shares travel by themselves and a worker may be behind (ps+backup): all of it is the first fragment's affair


class Word(msgspec.Struct, tag=True):
    """What a worker brings to a step beside parts: that it is there, what it lately needed for a share, its lanes."""

    step: int
    worker: int
    seconds: float
    lanes: list[int]
    fragments: list[int]


class Ended(msgspec.Struct, tag=True):
    """A worker of this term is gone: the term is over at this point for all, unless the sum is complete. Answered by
    `Done`: whether it is over."""

    step: int
    call: int
    leaves: int
    term: int
    fragments: list[int]


class Meet(msgspec.Struct, tag=True):
    """What a point has come to; waits until its sum is complete or the term is over at it, if told so. Answered by `Met`."""

    step: int
    call: int
    leaves: int
    term: int
    wait: bool


class Abreast(msgspec.Struct, tag=True):
    """Whether all these workers have come to this step; waits a little for it."""

    step: int
    workers: list[int]


class Lacking(msgspec.Struct, tag=True):
    """Which shares are missing in any of these fragments; answered by `Lacks`."""

    step: int
    call: int
    leaves: int
    fragments: list[int]


class Agreed(msgspec.Struct):
    """What a sum has with it: the lanes of the shares in it, and of every worker the last word when it was complete."""

    rows: list[bytes]
    words: dict[int, Word]


class Met(msgspec.Struct, tag=True):
    ended: bool
    agreed: bytes
    """An encoded `Agreed`, once the sum is complete."""
    steps: dict[int, int]
    """To which step each worker has come."""


class Lacks(msgspec.Struct, tag=True):
    leaves: list[int]


class Total(msgspec.Struct, tag=True):
    """The sum at a point over the divisor; answered by `Done` + bytes."""

    step: int
    call: int
    divisor: float
    fragments: list[int]


ABSENT, BY_VALUE = -1, -2
NOBODYS = (-1, -1)


class Update(msgspec.Struct, frozen=True):
    """One optimizer step: the same from every worker."""

    optimizer: int
    step: int
    hyper: list[Values]
    sources: dict[int, int]
    """For each parameter of the optimizer where its gradient is: the number of the step's reduce point, or that there is
    none, or that its value comes (the script has changed it)."""
    divisors: dict[int, float]
    """What the sum of each point is divided by."""
    touched: list[int]
    """Parameters that the script has changed by itself: their values come."""
    push: tuple[int, int] = NOBODYS
    """Where values that come are staged: by which worker, as its how-manieth push."""
    moved: bool = False
    """Whether buffers have moved: by how much is staged too."""
    gone: list[int] = []
    """Workers that are dead, and of whom nothing more will be counted: what they have staged is of no use."""


class Apply(msgspec.Struct, tag=True):
    """The `count`-th optimizer step of the run + an encoded `Update`, for all fragments at once; where clients train apart,
    the end of a round + an encoded `Closed`."""

    count: int
    fragments: list[int]


class Value(msgspec.Struct, tag=True):
    """Gradients, or weights, as the script has made them + bytes."""

    count: int
    weights: bool
    fragments: list[int]


class Stage(msgspec.Struct, tag=True):
    """Gradients of a push, for when it is counted + bytes, or excerpts of its message."""

    worker: int
    own: int
    """The worker's how-manieth push."""
    fragments: list[int]
    coded: list[int] = []
    """The fragments that the body is cut for, if it is excerpts: a backup may be told of some of these."""


class Bring(msgspec.Struct, tag=True):
    """What a client's training has come to, θ − w, for when its round is over + bytes."""

    number: int
    """Of the round."""
    leaf: int
    """The client's place among those of the round."""
    fragments: list[int]


class Pull(msgspec.Struct, tag=True):
    """Values after so many optimizer steps, once they are done; answered by `Done` + bytes."""

    version: int
    fragments: list[int]


class Rows(msgspec.Struct, tag=True):
    """Rows after so many row updates, once they are done + for each fragment, ids; answered by `Gathered` + the rows."""

    count: int
    fragments: list[int]
    most: int = 0
    """So many of these updates may be missing."""


class RowPush(msgspec.Struct, tag=True):
    """The gradients of one share, at the `point`-th reduce point since the row update before + for each fragment, ids and
    rows."""

    count: int
    """Of the row update that they are for."""
    point: int
    leaf: int
    fragments: list[int]
    behind: dict[int, int] = {}
    """By fragment, how many updates the share's reads of it have missed at most; where that is to be counted."""


class RowUpdate(msgspec.Struct):
    """One update of all rows that gradients have come for: the same from every worker."""

    divisors: list[float]
    """What the sum of each reduce point since the update before is divided by."""
    optimizers: list[RowOptimizer]
    """Of each table."""


class Advance(msgspec.Struct, tag=True):
    """The `count`-th row update of the run + an encoded `RowUpdate`, for all fragments at once."""

    count: int
    fragments: list[int]


class Survey(msgspec.Struct, tag=True):
    """What there is of rows; answered by `Done` + an encoded list of `Surveyed`, one for each fragment."""

    count: int
    fragments: list[int]
    hashed: bool


class Surveyed(msgspec.Struct):
    rows: int
    nbytes: int
    moved: int
    """How often this copy has moved a row."""
    sha256: bytes
    staleness: dict[int, int]
    """How many shares have read how many updates behind."""


class Summed(msgspec.Struct, tag=True):
    """From a primary: the sum at a point is complete + bytes."""

    step: int
    call: int
    leaves: int
    fragments: list[int]
    agreed: bytes = b""
    """An encoded `Agreed`, with the first fragment's."""


class Noted(msgspec.Struct, tag=True):
    """From a primary: the register as it is now, and its how-manieth state that is + bytes."""

    version: int
    fragments: list[int] = []


class Notes(msgspec.Struct, tag=True):
    """What a newcomer needs to know to begin in the middle of a stretch + a snapshot."""

    stretch: int
    fragments: list[int] = []


class Copy(msgspec.Struct, tag=True):
    """A primary hands on what it is about to do, before it does it + the same bytes. `layout` makes it primary."""

    layout: int
    primary: int
    since: list[int]
    """By which layouts the backup came to hold the fragments."""
    said: Lay | Summed | Apply | Value | Stage | Bring | Noted | Notes | RowPush | Advance | Word | Ended | KeySaid


class State(msgspec.Struct, tag=True):
    """The state of the fragment's optimizers; answered by `Done` + a snapshot of one list of states for each."""

    fragment: int


# the register: see `register.Register`


class Begin(msgspec.Struct, tag=True):
    """A worker begins a stretch of so many micro-batches; answered by `Begun`."""

    worker: int
    stretch: int
    total: int
    epoch: int
    loader: int
    members: list[int] = []
    """Who else will begin it, of those who train clients."""
    here: list[int] | None = None
    """Of a round's clients, those whose data this worker has; None: all."""
    last: int = 0
    """The run's step with which it ends at the latest, if there is one."""


class Enter(msgspec.Struct, tag=True):
    """A newcomer comes in the middle of a stretch; waits for one. Answered by `Done` + notes."""

    worker: int


class Ongoing(msgspec.Struct, tag=True):
    """Whether this round is still open; answered by `Done`."""

    stretch: int


class Turn(msgspec.Struct, tag=True):
    """What a worker has done, and what it has in hand next, once there is something and it may go on; answered by `Turned`."""

    worker: int
    stretch: int
    want: int
    """So many in hand, if there are."""
    delivered: list[Delivered]
    stop: int = 0
    written: int = -1
    """From main: of how many steps it has the receipts."""
    leaves: bool = False
    """It takes no more."""
    scheduled: int = 0
    """Which of the script's schedulers are stepped within its loop, a bit each."""


class Push(msgspec.Struct, tag=True):
    """Count a push whose gradients are staged everywhere + an encoded `Update`; answered by `Number`."""

    worker: int
    own: int
    number: int
    """The micro-batch, and which of its optimizer steps this is."""
    call: int
    heard: int
    """All servers have applied so many."""


class Lost(msgspec.Struct, tag=True):
    """These workers are dead and reaped."""

    workers: list[int]


class Had(msgspec.Struct, tag=True):
    """This worker is dead, and what it has not had counted never will be. Was its `own`-th push? Answered by `Done`."""

    worker: int
    own: int


class Unheard(msgspec.Struct, tag=True):
    """What pushes are there after this one? Answered by `Tail`."""

    after: int


class Hold(msgspec.Struct, tag=True):
    """Count nothing more, until it is said by the same worker that one may; answered by `Number` + the register."""

    worker: int
    yes: bool


class Begun(msgspec.Struct, tag=True):
    first: int
    """The run's step with which the stretch begins."""
    trainers: list[int]
    noted: bool
    """Whether `Notes` of it are there."""


class Turned(msgspec.Struct, tag=True):
    numbers: list[int]
    """What the worker has in hand; nothing: the stretch is over."""
    count: int
    """Pushes counted: the weights to go on with have all of them."""
    steps: int
    samples: int
    """Whole steps of the run so far, and samples."""
    trainers: list[int]
    gone: list[int]
    receipts: list[Receipt] = []
    stop: int = 0
    stopper: int = -1
    staleness: dict[int, int] = {}
    """When the stretch is over: how many pulls had how much."""
    waited: dict[int, float] = {}
    """Seconds that this took, by the worker that was waited for."""
    closed: Closed | None = None
    """When it was a round, and that counts."""
    scheduled: int = 0


class Number(msgspec.Struct, tag=True):
    count: int
    """Of a push in the order of all, or AGAIN; of pushes counted so far."""


class Tail(msgspec.Struct, tag=True):
    entries: list[Counted]
    count: int
    """Of all pushes."""


OfRows = Rows | RowPush | Advance | Survey
Meeting = Word | Ended | Meet | Abreast | Lacking
Asking = Begin | Enter | Ongoing | Turn | Push | Lost | Had | Unheard | Hold | Notes


class Done(msgspec.Struct, tag=True):
    yes: bool = True
    last: int = -1
    """Of sums that are complete: a share of the part that came last, if that is known."""


class Gathered(msgspec.Struct, tag=True):
    versions: list[int]
    """Of each fragment, how many updates are in the rows."""


class Moved(msgspec.Struct, tag=True):
    """An answer: this server is not the primary of what was asked for; a newer layout says who is."""


class Asked(msgspec.Struct, tag=True):
    """A worker's call, by this layout."""

    layout: int
    call: (
        Outline
        | Lay
        | Part
        | Sealed
        | Total
        | Apply
        | Value
        | Stage
        | Bring
        | Pull
        | State
        | Asking
        | OfRows
        | Meeting
        | KeyCall
    )


Call = Asked | Copy | Outline
ANSWER = Done | Gathered | Moved | Begun | Turned | Number | Tail | Met | Lacks | Pushed | Pulled
