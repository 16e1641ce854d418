"""What a server does with what it is told: it holds fragments as their primary, or as a backup of another server.

A primary tells its backups everything before it does it, and does it when all of them have. If one cannot be
reached, that is for the coordinator to judge: it waits for a layout without that backup, or without itself as the
primary. So whatever a worker has been answered is known to every copy that may ever take over.

Calls come from many threads, one a connection. Each fragment has its own lock, so that one is added up while
another one is still being sent. Who holds what is under one lock of its own, which is never held while anything is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from paceline.cluster.messages import Placed
from paceline.servers.carried import DTYPES
from paceline.servers.held import Held, Said, as_bytes
from paceline.servers.holders import NOWHERE
from paceline.servers.lines import Line, moved
from paceline.servers.messages import (
    Apply,
    Asked,
    Call,
    Copy,
    Done,
    Drawing,
    Lay,
    Moved,
    Outline,
    Part,
    Pull,
    Sealed,
    State,
    Summed,
    Total,
    Value,
)

Answer = tuple[msgspec.Struct, Sequence[memoryview]]
_LOOK_S = 0.05


class _NotPrimary(Exception):
    """This server is not the primary of a fragment, or not any more."""


class Shelf:
    """`number`: which server this is; `dial` connects to another one; `told(server, since)` is called when that one has
    been filled."""

    def __init__(
        self,
        number: int = 0,
        dial: Callable[[str], Line] | None = None,
        told: Callable[[int, dict[int, int]], None] | None = None,
    ) -> None:
        self._number, self._dial, self._told = number, dial, told
        self._drawing: Drawing | None = None
        self._drawn = b""
        """The same, encoded."""
        self._held: dict[int, Held] = {}
        self._layout = NOWHERE
        self._changed = threading.Condition()
        """About all of these, and the following."""
        self._lines: dict[int, Line] = {}
        self._filled: set[tuple[int, int, int]] = set()
        """(fragment, server, since): backups that have all of a fragment by this server's doing."""

    # who holds what

    def rearrange(self, layout: Placed) -> None:
        """A new layout. It takes no fragment's lock: whoever has one may be waiting for this."""
        with self._changed:
            self._layout = layout
            for server in [server for server in self._lines if server not in layout.addresses]:
                self._lines.pop(server).close()
            for fragment in [k for k, held in self._held.items() if held.since != _since(layout, k, self._number)]:
                del self._held[fragment]
            self._filled = {each for each in self._filled if each[2] == _since(layout, *each[:2])}
            self._changed.notify_all()

    def fill(self, after: int) -> int:
        """Wait for a layout newer than this one, and fill whom it says to fill; its number."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number > after)
            layout = self._layout
        done: dict[int, dict[int, int]] = {}
        for fragment, (primary, *backups) in enumerate(layout.holders):
            for server in backups:
                if primary == self._number and server not in layout.filled[fragment]:
                    since = _since(layout, fragment, server)
                    try:
                        self._fill_one(fragment, server, since)
                    except (OSError, _NotPrimary):
                        continue  # another layout will say what now
                    done.setdefault(server, {})[fragment] = since
        for server, filled in done.items():
            assert self._told is not None
            self._told(server, filled)
        return layout.number

    def _fill_one(self, fragment: int, server: int, since: int) -> None:
        held = self._mine(fragment)
        with held.changed:
            if (fragment, server, since) in self._filled:
                return
            line = self._line(server)
            number = self._layout.number
            for said, body in held.all_said():
                answer = line.call(Copy(number, self._number, since, fragment, said), *body).result()
                if moved(answer):
                    raise _NotPrimary
            with self._changed:
                self._filled.add((fragment, server, since))

    def _line(self, server: int) -> Line:
        with self._changed:
            if server not in self._lines:
                assert self._dial is not None
                if server not in self._layout.addresses:
                    raise ConnectionError(f"server {server} is gone")
                self._lines[server] = self._dial(self._layout.addresses[server])
                self._lines[server].call(Outline(), memoryview(self._drawn))
            return self._lines[server]

    def _backups(self, fragment: int) -> list[tuple[int, int]]:
        """Who must be told of everything, and since when they hold it; _NotPrimary if that is not this server's business."""
        with self._changed:
            holders = self._layout.holders[fragment] if fragment < len(self._layout.holders) else []
            if not holders or holders[0] != self._number:
                raise _NotPrimary
            filled = self._layout.filled[fragment]
            backups = list(zip(holders, self._layout.since[fragment], strict=True))[1:]
            return [
                (server, since)
                for server, since in backups
                if server in filled or (fragment, server, since) in self._filled
            ]

    def _tell(self, fragment: int, said: Said, body: Sequence[memoryview]) -> None:
        """All backups know of it when this returns."""
        told: set[tuple[int, int]] = set()
        while True:
            layout = self._layout
            rest = [backup for backup in self._backups(fragment) if backup not in told]
            if not rest:
                return
            for server, since in rest:
                try:
                    copy = Copy(layout.number, self._number, since, fragment, said)
                    answer = self._line(server).call(copy, *body).result()
                    if moved(answer):
                        raise ConnectionError(f"server {server} knows a newer layout")
                    told.add((server, since))
                except OSError:
                    self._await_layout_after(layout.number, server)

    def _await_layout_after(self, number: int, unreachable: int) -> None:
        with self._changed:
            self._lines.pop(unreachable, None)
            self._changed.wait_for(lambda: self._layout.number > number)

    # calls

    def handle(self, message: Call, body: memoryview) -> Answer:
        """ValueError: the caller is wrong. Some calls wait: each caller has a thread of its own."""
        try:
            match message:
                case Outline():
                    if self._drawing is None:
                        self._drawn = bytes(body)
                        self._drawing = msgspec.msgpack.decode(self._drawn, type=Drawing)
                    return Done(), ()
                case Copy():
                    return self._copy(message, body)
                case Asked(layout, call):
                    with self._changed:
                        self._changed.wait_for(lambda: self._layout.number >= layout)
                    return self._answer(call, body)
        except _NotPrimary:
            return Moved(), ()

    def _copy(self, message: Copy, body: memoryview) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number >= message.layout)
            since = _since(self._layout, message.fragment, self._number)
            if self._layout.holders[message.fragment][0] != message.primary or since != message.since:
                return Moved(), ()
        held = self._made(message.fragment)
        with held.changed:
            if not held.knows(message.said, body):
                held.do(message.said, body)
        return Done(), ()

    def _answer(self, call: msgspec.Struct, body: memoryview) -> Answer:
        match call:
            case Lay(fragment) | Value(_, fragment):
                self._hear(fragment, call, body)
            case Apply():
                for fragment in list(self._held):
                    if self._layout.holders[fragment][0] == self._number:
                        self._hear(fragment, call, body)
            case Part():
                self._part(call, body)
            case Sealed():
                return Done(all(self._is_sealed(fragment, call) for fragment in call.fragments)), ()
            case Total(step, point, divisor, fragment):
                held = self._mine(fragment)
                with held.changed:
                    return Done(), (as_bytes(held.over(step, point, divisor)),)
            case Pull(fragment, version):
                held = self._mine(fragment)
                with held.changed:
                    self._await(fragment, held, lambda: held.version >= version)
                    # Nobody changes it before this worker has brought its part of the next step.
                    return Done(), (as_bytes(held.value),)
            case State(fragment):
                held = self._mine(fragment)
                with held.changed:
                    return Done(), (memoryview(held.states().packed()),)
        return Done(), ()

    def _hear(self, fragment: int, said: Said, body: memoryview) -> None:
        held = self._mine(fragment)
        with held.changed:
            if not held.knows(said, body):
                self._tell(fragment, said, [body])
                held.do(said, body)

    def _part(self, part: Part, body: memoryview) -> None:
        held = self._mine(part.fragment)
        with held.changed:
            point = held.point(part)
            if point.total is None:
                total = point.add((part.a, part.b), held.read(body))
                if total is not None:
                    summed = Summed(part.step, part.call, part.leaves, part.fragment)
                    self._tell(part.fragment, summed, [as_bytes(total)])
                    held.do(summed, as_bytes(total))

    def _is_sealed(self, fragment: int, asked: Sealed) -> bool:
        held = self._mine(fragment)
        with held.changed:
            if asked.wait:
                self._await(fragment, held, lambda: held.sealed(asked.step, asked.call))
            return held.sealed(asked.step, asked.call)

    def _await(self, fragment: int, held: Held, moment: Callable[[], bool]) -> None:
        """Under the fragment's lock."""

        def over() -> bool:
            return moment() or self._held.get(fragment) is not held or self._layout.holders[fragment][0] != self._number

        while not held.changed.wait_for(over, _LOOK_S):
            continue  # nobody wakes it when the layout changes
        if not moment():
            raise _NotPrimary

    def _mine(self, fragment: int) -> Held:
        self._backups(fragment)
        return self._made(fragment)

    def _made(self, fragment: int) -> Held:
        with self._changed:
            if self._drawing is None or not 0 <= fragment < len(self._drawing.fragments):
                raise ValueError(f"there is no fragment {fragment}")
            if fragment not in self._held:
                found = self._drawing.fragments[fragment]
                dtype = DTYPES[self._drawing.flats[found.flat]]
                since = _since(self._layout, fragment, self._number)
                self._held[fragment] = Held(found, dtype, self._drawing.optimizers, since)
            return self._held[fragment]


def _since(layout: Placed, fragment: int, server: int) -> int:
    """By which layout a server came to hold a fragment; 0: it does not."""
    holders = layout.holders[fragment]
    return layout.since[fragment][holders.index(server)] if server in holders else 0
