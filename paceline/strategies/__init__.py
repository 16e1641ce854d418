"""How workers keep in step: one file each, one protocol, one table of names.

To add a strategy, write one file with a class that follows `Strategy`, and name it here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError
from paceline.servers import clocks
from paceline.servers.delays import OPTIONS, split
from paceline.settings import there_are
from paceline.strategies import rhythm
from paceline.tensors import codecs

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy
    from paceline.strategies.federation import Federation


class Entry(NamedTuple):
    module: str
    """Imported when the strategy is chosen."""
    name: str
    where: str
    when: str
    what: str
    """Where workers meet, when, and what they exchange: in a few words."""
    moves: str
    """What each sends and receives, P being the bytes of the parameters."""
    servers: bool = False
    """Whether workers meet at servers."""
    numbers: str = ""
    """What stands behind its name, for example."""
    one: bool = False
    """Whether there is exactly one server."""
    free: bool = False
    """Whether workers run at their own pace."""
    apart: bool = False
    """Whether each worker trains a replica of its own."""
    coded: tuple[str, str] | None = None
    """Module and class of the same with a codec, if there is one."""
    uncoded: str = ""
    """Why not."""
    kin: str = ""
    """Then: what takes a codec and is nearest to it; behind that the same number, if it has one."""
    rows: bool = False
    """Whether it trains the rows of a SparseEmbedding."""
    behind: bool = False
    """Whether these may be read some updates behind: then other bits come out each time."""
    reads: Callable[[str], object] = clocks.parse
    """What stands behind its name; UsageError if it cannot. Of those with servers."""

    @property
    def clients(self) -> bool:
        """Whether what workers train is clients, on data that may have to stay where it is."""
        return self.reads is _federation

    @property
    def words(self) -> str:
        return f"{self.when}, {self.what}, {self.where}"


def _federation(text: str) -> Federation:
    from paceline.strategies.federation import parse

    return parse(text)


def _free(when: str, numbers: str = "") -> Entry:
    moves = "P out and P in for each micro-batch"
    coded = "paceline.strategies.coded_free", "CodedFree"
    return Entry(*_FREE, "at servers", when, "gradients", moves, servers=True, numbers=numbers, free=True, coded=coded)


def _behind(where: str, one: bool) -> Entry:
    when, coded = "every step, rows at most 2 updates behind", _CODED_PS
    more = Entry(*_PS, where, when, "gradients", _EVERY, servers=True, numbers=":2", one=one, coded=coded)
    return more._replace(rows=True, behind=True)


def _apart(when: str, what: str, numbers: str, moves: str) -> Entry:
    return Entry(*_APART, "with each other", when, what, moves, numbers=numbers, apart=True, coded=_APART)


_PS = "paceline.strategies.ps", "ParameterServers"
_CODED_PS = "paceline.strategies.coded", "CodedServers"
_FREE = "paceline.strategies.free", "FreeRunning"
_APART = "paceline.strategies.averaging", "Averaging"
_EVERY = "P out and P in a step"
TABLE = {
    "allreduce": Entry(
        "paceline.strategies.allreduce",
        "AllReduce",
        "with each other",
        "every step",
        "gradients",
        _EVERY,
        coded=("paceline.strategies.coded", "CodedAllReduce"),
    ),
    "ps": Entry(*_PS, "at servers", "every step", "gradients", _EVERY, servers=True, coded=_CODED_PS, rows=True),
    "ps+backup": Entry(
        "paceline.strategies.backup",
        "Backups",
        "at servers",
        "every step, slow shares twice",
        "gradients",
        "P out for each share and P in a step",
        servers=True,
        numbers=":1",
        uncoded="who is slow may be steps behind, and what a codec keeps of its share is by then that of a later step",
        kin="ps",
    ),
    "ps+rows": _behind("at servers", one=False),
    "central": Entry(
        *_PS, "at one server", "every step", "gradients", _EVERY, servers=True, one=True, coded=_CODED_PS, rows=True
    ),
    "central+rows": _behind("at one server", one=True),
    "async": _free("no waiting"),
    "ssp": _free("at most 3 steps ahead of the slowest", ":3"),
    "dssp": _free("1 to 8 steps ahead, as it pays", ":1,8"),
    "local": _apart("every 20 steps", "weights", ":20", "P out and P in every 20 steps"),
    "postlocal": _apart(
        "every step until step 500, then every 20", "weights", ":500,20", "first as allreduce, then as local"
    ),
    "diloco": _apart("every 50 steps", "differences, for an outer optimizer", ":50", "P out and P in every 50 steps"),
    "streaming": _apart(
        "every 50 steps, 4 fragments in turn",
        "differences, for an outer optimizer",
        ":50,4",
        "as diloco, a fourth at a time",
    ),
    "gossip": Entry(
        "paceline.strategies.gossip",
        "Gossip",
        "with one other, drawn anew each time",
        "every 4 steps",
        "weights",
        "P out and P in every 4 steps",
        numbers=":4",
        apart=True,
        uncoded="weights, not differences: what a codec leaves out of these is lost with each change of partner",
        kin="local",
    ),
    "federated": Entry(
        "paceline.strategies.federated",
        "Federated",
        "at servers",
        "every round, a sample of clients",
        "what they have trained",
        "P out and P in for each client and round",
        servers=True,
        numbers=":rounds=50,clients=8,sample=4",
        uncoded="a client remembers nothing from round to round, and what a codec leaves out would be lost",
        reads=_federation,
    ),
}


def find(text: str) -> Entry:
    """The strategy of this name, with whatever stands behind it.

    >>> find("allreduce+topk:0.01").name
    'CodedAllReduce'
    """
    plain, codec = split_codec(text)
    entry = _find(plain)
    if not codec:
        return entry
    codecs.read(codec)
    if entry.coded is None:
        coded = f", or {_kin(plain, entry)}+{codec}" if entry.kin else ""
        raise UsageError(
            f"--strategy {text}: {plain} sends everything as it is ({entry.uncoded}); write {plain}{coded}"
        )
    module, name = entry.coded
    return entry._replace(module=module, name=name)


def _kin(plain: str, entry: Entry) -> str:
    """
    >>> _kin("gossip:4", TABLE["gossip"]), _kin("ps+backup:1", TABLE["ps+backup"])
    ('local:4', 'ps')
    """
    if not TABLE[entry.kin].apart:
        return entry.kin
    return f"{entry.kin}:{rhythm.parse(plain).every}"


def _first_legal(*candidates: str) -> str:
    """The nearest comes first. If there is none, what is wrong with the last one is the thing to say."""
    for text in candidates[:-1]:
        try:
            find(text)
        except UsageError:
            continue
        return text
    find(candidates[-1])
    return candidates[-1]


def rounds_of(text: str) -> int:
    """The rounds that are part of a strategy, whatever the script's run.epochs(n) or --epochs say; 0: there are none.

    >>> rounds_of("federated:rounds=3,clients=8"), rounds_of("federated"), rounds_of("ssp:3")
    (3, 0, 0)
    """
    return _federation(text).rounds if find(text).clients else 0


def split_codec(text: str) -> tuple[str, str]:
    """A strategy as it is written, and the codec that is joined to it, if there is one.

    >>> split_codec("ssp:3+dc:0.04+topk:0.01"), split_codec("ps+backup:1")
    (('ssp:3+dc:0.04', 'topk:0.01'), ('ps+backup:1', ''))
    """
    *words, last = text.split("+")
    early = [word for word in words[1:] if codecs.is_codec(word)]
    if early and not codecs.is_codec(last):
        rest = [word for word in (*words, last) if word not in early]
        near = _first_legal("+".join([*rest, early[-1]]), f"{words[0]}+{early[-1]}", words[0])
        raise UsageError(f"--strategy {text}: a codec comes last; write {near}")
    if not words or not codecs.is_codec(last):
        return text, ""
    if codecs.is_codec(words[-1]) and len(words) > 1:
        rest = [word for word in words if not codecs.is_codec(word)]
        near = _first_legal("+".join([*rest, last]), "+".join(rest), words[0])
        raise UsageError(f"--strategy {text}: gradients are sent by one codec; write {near}")
    return "+".join(words), last


def _find(text: str) -> Entry:
    _refuse_misplaced_rows(text)
    first, *options = text.split("+")
    mode = text
    if options and text.partition(":")[0] not in (name for name in TABLE if "+" in name):
        _refuse_misplaced_options(text, first, options, _find(first))
        mode = split(text)[0]
    name, _, numbers = mode.partition(":")
    if name not in TABLE:
        listed = [f"{known}{entry.numbers}" for known, entry in TABLE.items()]
        words = f"unknown strategy {text!r}{there_are(name, TABLE, listed)}"
        raise UsageError(f"{words}; `paceline strategies` says what they do")
    if TABLE[name].apart:
        rhythm.parse(text)
    elif TABLE[name].servers:
        TABLE[name].reads(mode)
    elif numbers:
        raise UsageError(f"--strategy {text}: {name} takes no numbers; write --strategy {name}")
    return TABLE[name]


def _refuse_misplaced_options(text: str, first: str, options: list[str], entry: Entry) -> None:
    """What is joined to a strategy, and is no codec: only workers at their own pace take something."""
    if entry.free:
        return
    delays = [option for option in options if option.partition(":")[0] in OPTIONS]
    for option in options if entry.coded else ():
        if option not in delays:
            codecs.read(option)
    if delays:
        near = "" if _keeps_apart(entry) else f", or {_first_legal(f'async+{delays[0]}', 'async+damp:0.5')}"
        raise UsageError(f"--strategy {text}: only workers at their own pace have delays; write {first}{near}")
    raise UsageError(f"--strategy {text}: {options[0]!r} cannot be joined to {first}; write {first}")


def _keeps_apart(entry: Entry) -> bool:
    """Whether weights are trained apart, on data that may have to stay where it is: nothing at servers is near to that."""
    return entry.apart or entry.clients


def _refuse_misplaced_rows(text: str) -> None:
    first, *options = text.split("+")
    bounds = [option for option in options if option.partition(":")[0] == "rows"]
    if not bounds or (options == bounds[:1] and f"{first}+rows" in TABLE):
        return
    number = bounds[-1].partition(":")[2]
    bound = f"rows:{number}" if number.isascii() and number.isdigit() else "rows:2"
    if f"{first}+rows" in TABLE and not options[0].startswith("backup"):
        raise UsageError(f"--strategy {text}: nothing but a codec can be joined to {first}+rows; write {first}+{bound}")
    entry = TABLE.get(first.partition(":")[0])
    apart = entry is not None and _keeps_apart(entry)
    raise UsageError(
        f"--strategy {text}: only ps and central train the rows of a SparseEmbedding, which lie at their servers; write "
        f"{_first_legal(first) if apart else f'ps+{bound}'}"
    )


def create(text: str) -> Strategy:
    entry = find(text)
    strategy: Strategy = getattr(import_module(entry.module), entry.name)(text)
    return strategy
