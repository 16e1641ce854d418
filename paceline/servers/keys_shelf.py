"""Keys at a server: named tensors in fragments, of which each has a primary and backups (`copying`).

A push is named by its worker and a number. The last one that was done is kept beside the values, at every copy. So a
push that is said again, because its answer was lost with a server, is known there and counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from paceline.servers.copying import Answered, Copying
from paceline.servers.keys_messages import FRAGMENTS, KeyCall, KeySaid, Laid, Mark, Marks, Names, Pulls, Pushes
from paceline.servers.kv import Pull, Pushed, Store
from paceline.servers.messages import Done
from paceline.servers.serving import Answer
from paceline.tensors.channel import memory_of
from paceline.wires.messages import Placed

_NONE = Mark(0, 0)


class Drawer:
    """One fragment. All methods are called under `changed`."""

    def __init__(self, since: int) -> None:
        self.since, self.changed = since, threading.Condition()
        self._store = Store()
        self._marks: dict[int, Mark] = {}
        self._same = 0
        """The layout by which a primary has last made it the same as its own."""

    def knows(self, said: KeySaid, body: memoryview) -> bool:
        """ValueError: it cannot be done, which nobody else is told."""
        match said:
            case Pushes(_, worker, number, push):
                last = self._marks.get(worker, _NONE).number
                if number > last + 1:
                    raise ValueError(f"{push.key}: push {number} of worker {worker} has come, and {last + 1} never did")
                if number == last + 1:
                    self._store.check(push, body)
                return number <= last
            case Laid(_, push, _, by):
                return by <= self._same or self._store.version(push.key) == push.at_least
            case Marks(by=by):
                return by <= self._same

    def do(self, said: KeySaid, body: memoryview) -> None:
        match said:
            case Pushes(_, worker, number, push):
                self._store.push(replace(push, pull=False), body)
                self._marks[worker] = Mark(number, self._store.version(push.key))
            case Laid(_, push, marks):
                self._store.lay(push, body)
                self._marks = marks
            case Marks(_, marks, keys, by):
                self._store.keep(keys)
                self._marks, self._same = marks, by

    def all_said(self) -> Iterator[tuple[KeySaid, Sequence[memoryview]]]:
        for push, tensor in self._store.everything():
            yield Laid([], push, self._marks), [memory_of(tensor)]
        yield Marks([], self._marks, self.names()), ()

    # what is asked

    def answer(self, pushes: Pushes) -> Answer:
        """To a push that is done."""
        if pushes.push.pull:
            return self._store.pull(Pull(pushes.push.key))
        return Answer(Pushed(self._marks[pushes.worker].version))

    def pull(self, pull: Pull) -> Answer:
        return self._store.pull(pull)

    def names(self) -> list[str]:
        return [push.key for push, _ in self._store.everything()]


class KeyShelf(Copying[Drawer]):
    """One that takes a fragment over makes its backups the same as itself before it answers anything: the primary that was lost
    may have told some of them of a push, and its worker may be lost too, so that nobody says it again. At most one push is in
    doubt, as they are told one after the other; whoever takes over says whether it counts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._doubtful: set[int] = set()
        """Fragments that this server leads by now, and has not done so for."""

    def rearrange(self, layout: Placed) -> None:
        with self._changed:
            before = self._layout
            super().rearrange(layout)
            mine = {k for k, holders in enumerate(layout.holders) if holders[0] == self._number}
            led = {k for k, holders in enumerate(before.holders) if holders[0] == self._number}
            if not before.number:
                return
            follows = layout.number == before.number + 1  # else others may have led in between
            self._doubtful = (self._doubtful & mine) | (mine - led if follows else mine)

    def _settle(self, fragment: int, drawer: Drawer) -> None:
        with self._changed:
            if fragment not in self._doubtful:
                return
            by = self._layout.number
        if self._backups(fragment):
            for said, bodies in drawer.all_said():
                self._tell(self._labelled(said, by), {fragment: bodies[0] if bodies else memoryview(b"")})
        with self._changed:
            if self._layout.number == by:
                self._doubtful.discard(fragment)

    def _new(self, fragment: int, since: int) -> Drawer:
        if not 0 <= fragment < FRAGMENTS:
            raise ValueError(f"there is no fragment {fragment}")
        return Drawer(since)

    def _labelled(self, said: Any, by: int) -> Any:
        return replace(said, by=by)

    def _cut(self, said: Any, body: memoryview) -> dict[int, memoryview]:
        return dict.fromkeys(said.fragments, body)

    def _answer(self, call: KeyCall, body: memoryview, by: int) -> Answered:
        (fragment,) = call.fragments
        with self._locked([fragment]) as (drawer,):
            self._settle(fragment, drawer)
            match call:
                case Pushes():
                    fresh = not drawer.knows(call, body)
                    # Also what is known here: a primary that was lost may have told this server and no other.
                    self._tell(call, {fragment: body})
                    if fresh:
                        drawer.do(call, body)
                    return drawer.answer(call)
                case Pulls(_, pull):
                    return drawer.pull(pull)
                case Names():
                    return Done(), [memoryview(msgspec.msgpack.encode(drawer.names()))]
