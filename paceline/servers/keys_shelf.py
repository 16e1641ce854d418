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

_NONE = Mark(0, 0)


class Drawer:
    """One fragment. All methods are called under `changed`."""

    def __init__(self, since: int) -> None:
        self.since, self.changed = since, threading.Condition()
        self._store = Store()
        self._marks: dict[int, Mark] = {}

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
            case Laid(_, push):
                return self._store.version(push.key) >= push.at_least
            case Marks(_, marks):
                return all(self._marks.get(worker, _NONE) >= mark for worker, mark in marks.items())

    def do(self, said: KeySaid, body: memoryview) -> None:
        match said:
            case Pushes(_, worker, number, push):
                self._store.push(replace(push, pull=False), body)
                self._marks[worker] = Mark(number, self._store.version(push.key))
            case Laid(_, push):
                self._store.push(push, body)
            case Marks(_, marks):
                self._marks = marks

    def all_said(self) -> Iterator[tuple[KeySaid, Sequence[memoryview]]]:
        for push, tensor in self._store.everything():
            yield Laid([], push), [memory_of(tensor)]
        yield Marks([], self._marks), ()

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
    def _new(self, fragment: int, since: int) -> Drawer:
        if not 0 <= fragment < FRAGMENTS:
            raise ValueError(f"there is no fragment {fragment}")
        return Drawer(since)

    def _cut(self, said: Any, body: memoryview) -> dict[int, memoryview]:
        return dict.fromkeys(said.fragments, body)

    def _answer(self, call: KeyCall, body: memoryview, by: int) -> Answered:
        (fragment,) = call.fragments
        with self._locked([fragment]) as (drawer,):
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
