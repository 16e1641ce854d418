"""Fragments of which several servers hold copies: one as the primary, others as its backups.

A primary tells its backups everything before it does it, and does it when all of them have. If one cannot be
reached, that is for the coordinator to judge: it is tried again until there is a layout without that backup, or without
this server as the primary. So whatever a worker has been answered is known to every copy that may ever take over.

Calls come from many threads, one a connection. Each fragment has its own lock, so that one is added up while
another one is still being sent. Who holds what is under one lock of its own, which is never held while anything is said.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from paceline.servers.holders import NOWHERE
from paceline.servers.lines import Line, before_redial, moved
from paceline.servers.messages import Asked, Call, Copy, Done, Moved
from paceline.servers.serving import Answer
from paceline.wires.messages import Placed

LOOK_S = 0.05
Answered: TypeAlias = Answer | tuple[msgspec.Struct, Sequence[memoryview]]


class NotPrimary(Exception):
    """This server is not the primary of a fragment, or not any more."""


class Copied(Protocol):
    """One fragment at a server. What becomes of it is computed from what is said alone, so copies are the same bits. All
    methods are called under `changed`."""

    since: int
    """By which layout this server came to hold it."""
    changed: threading.Condition

    def knows(self, said: Any, body: memoryview) -> bool:
        """Whether this has been said before; ValueError if it cannot be."""

    def do(self, said: Any, body: memoryview) -> None: ...
    def all_said(self) -> Iterator[tuple[Any, Sequence[memoryview]]]:
        """What makes another copy the same as this one; without its number, which it does not know."""


Kept = TypeVar("Kept", bound=Copied)


class Copying(ABC, Generic[Kept]):
    """`number`: which server this is; `dial` connects to another one; `told(server, since)` is called when that one has
    been filled."""

    def __init__(
        self,
        number: int = 0,
        dial: Callable[[str], Line] | None = None,
        told: Callable[[int, dict[int, int]], None] | None = None,
    ) -> None:
        self._number, self._dial, self._told = number, dial, told
        self._held: dict[int, Kept] = {}
        self._layout = NOWHERE
        self._changed = threading.Condition()
        """About all of these, and the following."""
        self._lines: dict[int, Line] = {}
        self._filled: set[tuple[int, int, int]] = set()
        """(fragment, server, since): backups that have all of a fragment by this server's doing."""

    # what kind of fragments they are

    @abstractmethod
    def _new(self, fragment: int, since: int) -> Kept:
        """An empty one; ValueError if there is none of this number."""

    @abstractmethod
    def _answer(self, call: Any, body: memoryview, by: int) -> Answered:
        """To a worker, which asks by this layout."""

    @abstractmethod
    def _cut(self, said: Any, body: memoryview) -> dict[int, memoryview]:
        """Each fragment's bytes."""

    def _joined(self, said: Any, bodies: Sequence[memoryview]) -> Sequence[memoryview]:
        """The same, back in one."""
        return bodies

    def _labelled(self, said: Any, by: int) -> Any:
        """What fills another copy, as it is said by this layout."""
        return said

    @property
    def _begun(self) -> bool:
        """Whether it is known what there is to hold."""
        return True

    def _introduce(self, line: Line) -> None:
        """The first words to another server."""

    # who holds what

    def rearrange(self, layout: Placed) -> None:
        """A new layout. It takes no fragment's lock: whoever has one may be waiting for this."""
        with self._changed:
            self._layout = layout
            for server in [server for server in self._lines if server not in layout.addresses]:
                self._hang_up(server)
            for fragment in [k for k, held in self._held.items() if held.since != _since(layout, k, self._number)]:
                del self._held[fragment]
            self._filled = {each for each in self._filled if each[2] == _since(layout, *each[:2])}
            self._changed.notify_all()

    def fill(self, after: int) -> int:
        """Wait for a layout newer than this one, and fill whom it says to fill; its number."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number > after and self._begun)
            layout = self._layout
        done: dict[int, dict[int, int]] = {}
        for fragment, (primary, *backups) in enumerate(layout.holders):
            for server in backups:
                if primary == self._number and server not in layout.filled[fragment]:
                    since = _since(layout, fragment, server)
                    try:
                        self._fill_one(fragment, server, since)
                    except (ConnectionError, NotPrimary):
                        continue  # another layout says what now
                    done.setdefault(server, {})[fragment] = since
        for server, filled in done.items():
            assert self._told is not None
            self._told(server, filled)
        return layout.number

    def _fill_one(self, fragment: int, server: int, since: int) -> None:
        with self._locked([fragment]) as (held,):
            if (fragment, server, since) in self._filled:
                return
            number = self._layout.number
            for said, body in held.all_said():
                one = replace(self._labelled(said, number), fragments=[fragment])
                if not self._say(server, Copy(number, self._number, [since], one), body):
                    raise NotPrimary
            with self._changed:
                self._filled.add((fragment, server, since))

    def _say(self, server: int, copy: Copy, body: Sequence[memoryview]) -> bool:
        """Whether a backup has this now. If not, it knows a newer layout, which comes to this server too. ConnectionError: there
        is one here already, without that backup.

        A line that breaks says nothing about the server: it is said again over the next one, and ignored if it was heard. To
        wait for a layout here might be for ever, and with the fragment's lock."""
        while True:
            line = self._line(server)
            try:
                return not moved(line.call(copy, *body).result())
            except OSError:
                with self._changed:
                    if self._lines.get(server) is line:  # else another thread has hung up, and may have called again
                        self._hang_up(server)
                before_redial()

    def _line(self, server: int) -> Line:
        """Tried for as long as the layout has it: another machine may not be reached for a moment. Not under the lock: it
        may take long, and the layout that says that the server is gone must be heard meanwhile."""
        assert self._dial is not None
        while True:
            with self._changed:
                if server in self._lines:
                    return self._lines[server]
                if server not in self._layout.addresses:
                    raise ConnectionError(f"server {server} is gone")
                address = self._layout.addresses[server]
            try:
                line = self._dial(address)
            except OSError:
                with self._changed:
                    self._changed.wait(LOOK_S)
                continue
            self._introduce(line)
            with self._changed:
                if server in self._layout.addresses and server not in self._lines:
                    self._lines[server] = line
                    return line
            line.close()  # another thread was faster, or it is gone

    def _backups(self, fragment: int) -> list[tuple[int, int]]:
        """Who must be told of everything, and since when they hold it; NotPrimary if that is not this server's business."""
        with self._changed:
            holders = self._layout.holders[fragment] if fragment < len(self._layout.holders) else []
            if not holders or holders[0] != self._number:
                raise NotPrimary
            filled = self._layout.filled[fragment]
            backups = list(zip(holders, self._layout.since[fragment], strict=True))[1:]
            return [
                (server, since)
                for server, since in backups
                if server in filled or (fragment, server, since) in self._filled
            ]

    def _tell(self, said: Any, bodies: Mapping[int, memoryview]) -> None:
        """All backups know of what is said about these fragments when this returns."""
        told: set[tuple[int, int, int]] = set()
        while True:
            layout = self._layout
            rest = {(k, *backup) for k in bodies for backup in self._backups(k)} - told
            if not rest:
                return
            lost = [
                server for server in {server for _, server, _ in rest} if not self._tell_one(server, said, bodies, rest)
            ]
            told |= {each for each in rest if each[1] not in lost}
            if lost:
                self._await_layout_after(layout.number)

    def _tell_one(
        self, server: int, said: Any, bodies: Mapping[int, memoryview], rest: Collection[tuple[int, int, int]]
    ) -> bool:
        mine = sorted((k, since) for k, to, since in rest if to == server)
        numbers = [k for k, _ in mine]
        copy = Copy(self._layout.number, self._number, [since for _, since in mine], replace(said, fragments=numbers))
        body = self._joined(said, [bodies[k] for k in numbers])
        try:
            return self._say(server, copy, body)
        except ConnectionError:
            return False

    def _await_layout_after(self, number: int) -> None:
        """No line is hung up on here: others have calls under way there, which are not refused."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number > number)

    def _hang_up(self, server: int) -> None:
        """On one that is gone, or whose line is broken. Never on account of an answer: others are saying theirs on that line."""
        line = self._lines.pop(server, None)
        if line is not None:  # not here: that waits for whoever is still sending, and this is under the lock
            threading.Thread(target=line.close, daemon=True).start()

    # calls

    def handle(self, message: Call, body: memoryview) -> Answered:
        """ValueError: the caller is wrong. Some calls wait: each caller has a thread of its own."""
        try:
            match message:
                case Copy():
                    return self._copy(message, body)
                case Asked(layout, call):
                    with self._changed:
                        self._changed.wait_for(lambda: self._layout.number >= layout)
                    return self._answer(call, body, layout)
                case _:
                    raise ValueError(f"nothing is held here of what {type(message).__name__} is about")
        except NotPrimary:
            return Moved(), ()

    def _copy(self, message: Copy, body: memoryview) -> Answered:
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number >= message.layout)
        self._check_copy(message)
        bodies = self._cut(message.said, body)
        for fragment in message.said.fragments:
            held = self._made(fragment)
            # Once the two have changed places, whoever has this lock may be waiting for the one that says this.
            while not held.changed.acquire(timeout=LOOK_S):
                self._check_copy(message)
            try:
                self._check_copy(message)
                if not held.knows(message.said, bodies[fragment]):
                    held.do(message.said, bodies[fragment])
            finally:
                held.changed.release()
        return Done(), ()

    def _check_copy(self, message: Copy) -> None:
        """Is it the primary that says this, and of what this server still holds?"""
        with self._changed:
            for fragment, since in zip(message.said.fragments, message.since, strict=True):
                known = _since(self._layout, fragment, self._number)
                if self._layout.holders[fragment][0] != message.primary or since != known:
                    raise NotPrimary

    @contextmanager
    def _locked(self, fragments: Sequence[int]) -> Iterator[list[Kept]]:
        """Fragments of which this server is the primary. Always in one order: two callers never wait for each other."""
        with self._changed:
            self._check_primary(fragments)
            helds = {fragment: self._made(fragment) for fragment in fragments}
        with ExitStack() as stack:
            for fragment in sorted(helds):
                stack.enter_context(helds[fragment].changed)
            with self._changed:  # the layout may be another one since
                self._check_primary(fragments)
                self._check_same(helds)
            yield [helds[fragment] for fragment in fragments]
            self._check_same(helds)  # dropped and back meanwhile: what was done was done to nothing

    def _check_same(self, helds: Mapping[int, Kept]) -> None:
        with self._changed:
            if any(self._held.get(fragment) is not held for fragment, held in helds.items()):
                raise NotPrimary

    def _check_primary(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self._backups(fragment)

    def _made(self, fragment: int) -> Kept:
        with self._changed:
            if fragment not in self._held:
                self._held[fragment] = self._new(fragment, _since(self._layout, fragment, self._number))
            return self._held[fragment]


def _since(layout: Placed, fragment: int, server: int) -> int:
    """By which layout a server came to hold a fragment; 0: it does not."""
    holders = layout.holders[fragment]
    return layout.since[fragment][holders.index(server)] if server in holders else 0
