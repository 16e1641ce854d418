"""What a server does with what it is told: it holds fragments as their primary, or as a backup of another server.

A primary tells its backups everything before it does it, and does it when all of them have. If one cannot be
reached, that is for the coordinator to judge: it waits for a layout without that backup, or without itself as the
primary. So whatever a worker has been answered is known to every copy that may ever take over.

Calls come from many threads, one a connection. Each fragment has its own lock, so that one is added up while
another one is still being sent. Who holds what is under one lock of its own, which is never held while anything is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from paceline.cluster.messages import Placed
from paceline.servers.carried import DTYPES
from paceline.servers.clocks import BEHIND, Backup, parse
from paceline.servers.held import Held, Said, as_bytes
from paceline.servers.holders import NOWHERE
from paceline.servers.lines import Line, moved
from paceline.servers.messages import (
    Abreast,
    Apply,
    Asked,
    Asking,
    Begin,
    Call,
    Copy,
    Done,
    Drawing,
    Ended,
    Enter,
    Go,
    Hold,
    Lacking,
    Lacks,
    Lay,
    Lost,
    Meet,
    Moved,
    Noted,
    Notes,
    Outline,
    Part,
    Pull,
    Push,
    Sealed,
    Stage,
    State,
    Summed,
    Total,
    Turn,
    Unheard,
    Value,
    Word,
)
from paceline.servers.registry import Answer, Registry

_LOOK_S = 0.05
Copied = Said | Noted | Notes


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
        self._held: dict[int, Any] = {}
        """`Held`, or the `Registry`: both know, do and tell what is said."""
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
                self._hang_up(server)
            for fragment in [k for k, held in self._held.items() if held.since != _since(layout, k, self._number)]:
                del self._held[fragment]
            self._filled = {each for each in self._filled if each[2] == _since(layout, *each[:2])}
            self._changed.notify_all()

    def fill(self, after: int) -> int:
        """Wait for a layout newer than this one, and fill whom it says to fill; its number."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout.number > after and self._drawing is not None)
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
        with self._locked([fragment]) as (held,):
            if (fragment, server, since) in self._filled:
                return
            line, number = self._line(server), self._layout.number
            for said, body in held.all_said():
                copy = Copy(number, self._number, [since], replace(said, fragments=[fragment]))
                if moved(line.call(copy, *body).result()):
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

    def _tell(self, said: Copied, bodies: Mapping[int, memoryview]) -> None:
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
            for server in lost:
                self._await_layout_after(layout.number, server)

    def _tell_one(
        self, server: int, said: Copied, bodies: Mapping[int, memoryview], rest: Collection[tuple[int, int, int]]
    ) -> bool:
        mine = sorted((k, since) for k, to, since in rest if to == server)
        numbers = [k for k, _ in mine]
        copy = Copy(self._layout.number, self._number, [since for _, since in mine], replace(said, fragments=numbers))
        # What is said of all fragments together has one body.
        body = [bodies[numbers[0]]] if isinstance(said, Apply) else [bodies[k] for k in numbers]
        try:
            return not moved(self._line(server).call(copy, *body).result())
        except OSError:
            return False

    def _await_layout_after(self, number: int, unreachable: int) -> None:
        with self._changed:
            self._hang_up(unreachable)
            self._changed.wait_for(lambda: self._layout.number > number)

    def _hang_up(self, server: int) -> None:
        line = self._lines.pop(server, None)
        if line is not None:  # not here: that waits for whoever is still sending, and this is under the lock
            threading.Thread(target=line.close, daemon=True).start()

    # calls

    def handle(self, message: Call, body: memoryview) -> Answer:
        """ValueError: the caller is wrong. Some calls wait: each caller has a thread of its own."""
        try:
            match message:
                case Outline():
                    with self._changed:
                        if self._drawing is None:
                            self._drawn = bytes(body)
                            self._drawing = msgspec.msgpack.decode(self._drawn, type=Drawing)
                            self._changed.notify_all()
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
        self._check_copy(message)
        bodies = self._cut(message.said, body)
        for fragment in message.said.fragments:
            held = self._made(fragment)
            # Once the two have changed places, whoever has this lock may be waiting for the one that says this.
            while not held.changed.acquire(timeout=_LOOK_S):
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
                    raise _NotPrimary

    def _answer(self, call: msgspec.Struct, body: memoryview) -> Answer:
        match call:
            case Lay() | Value() | Apply() | Stage() | Notes() | Word():
                self._hear(call, body)
            case Ended():
                self._hear(call, body)
                with self._locked(call.fragments) as (held,):
                    return Done(held.point(call).ended >= call.term), ()
            case Meet() | Abreast():
                return self._meet(call)
            case Lacking(fragments=fragments):
                with self._locked(fragments) as helds:
                    return Lacks(sorted({leaf for held in helds for leaf in held.point(call).lacking()})), ()
            case Part():
                self._part(call, body)
            case Sealed():
                return Done(all(self._is_sealed(fragment, call) for fragment in call.fragments)), ()
            case Total(step, point, divisor, fragments):
                with self._locked(fragments) as helds:
                    return Done(), [as_bytes(held.over(step, point, divisor)) for held in helds]
            case Pull(version, fragments):
                return Done(), [as_bytes(self._pulled(fragment, version)) for fragment in fragments]
            case Begin() | Enter() | Turn() | Push() | Go() | Lost() | Unheard() | Hold():
                return self._register(call, body)
            case State(fragment):
                with self._locked([fragment]) as (held,):
                    return Done(), (memoryview(held.states().packed()),)
        return Done(), ()

    def _hear(self, said: Said | Notes, body: memoryview) -> None:
        bodies = self._cut(said, body)
        with self._locked(said.fragments) as helds:
            fresh = {
                k: (held, bodies[k])
                for k, held in zip(said.fragments, helds, strict=True)
                if not held.knows(said, bodies[k])
            }
            # What is known here already too: a primary that was lost may have told this server and no other.
            self._tell(said, bodies)
            for held, mine in fresh.values():
                held.do(said, mine)

    def _part(self, part: Part, body: memoryview) -> None:
        bodies = self._cut(part, body)
        with self._locked(part.fragments) as helds:
            complete: dict[int, tuple[Held, memoryview]] = {}
            for k, held in zip(part.fragments, helds, strict=True):
                point = held.point(part)
                total = point.total
                if total is None:
                    total = point.add((part.a, part.b), held.read(bodies[k]), part.lanes)
                if total is not None:
                    complete[k] = held, as_bytes(total)
            agreed = complete[0][0].agreement(part) if 0 in complete else b""
            summed = Summed(part.step, part.call, part.leaves, list(complete), agreed)
            self._tell(summed, {k: sums for k, (_, sums) in complete.items()})
            for held, sums in complete.values():
                held.do(summed, sums)

    def _is_sealed(self, fragment: int, asked: Sealed) -> bool:
        with self._locked([fragment]) as (held,):
            if asked.wait:
                self._await(fragment, held, lambda: held.sealed(asked.step, asked.call))
            return bool(held.sealed(asked.step, asked.call))

    def _meet(self, asked: Meet | Abreast) -> Answer:
        with self._locked([0]) as (held,):
            if isinstance(asked, Abreast):
                words = held.words

                def there() -> bool:
                    return all(worker in words and words[worker].step >= asked.step for worker in asked.workers)

                return Done(held.changed.wait_for(there, _LOOK_S)), ()
            if asked.wait:
                point = held.point(asked)
                self._await(0, held, lambda: point.total is not None or point.ended >= asked.term)
            return held.met(asked), ()

    def _pulled(self, fragment: int, version: int) -> torch.Tensor:
        """Where workers step together nobody changes it before this one has brought its part of the next step."""
        assert self._drawing is not None
        with self._locked([fragment]) as (held,):
            self._await(fragment, held, lambda: held.version >= version)
            value: torch.Tensor = held.values(version)
            return value.clone() if self._drawing.slots else value

    def _register(self, call: Asking, body: memoryview) -> Answer:
        """What is asked of the register: it may have to wait, and be considered again whenever that has changed."""
        assert self._drawing is not None
        number = len(self._drawing.fragments)
        with self._locked([number]) as (registry,):
            while True:
                answer: Answer | None
                answer, state = registry.draft(call, body)
                if state:
                    noted = Noted(registry.version + 1, [number])
                    self._tell(noted, {number: memoryview(state)})
                    registry.do(noted, memoryview(state))
                if answer is not None:
                    return answer
                registry.changed.wait(_LOOK_S)
                if self._held.get(number) is not registry:
                    raise _NotPrimary
                self._check_primary([number])

    @contextmanager
    def _locked(self, fragments: Sequence[int]) -> Iterator[list[Any]]:
        """Fragments of which this server is the primary. Always in one order: two callers never wait for each other."""
        with self._changed:
            self._check_primary(fragments)
            helds = {fragment: self._made(fragment) for fragment in fragments}
        with ExitStack() as stack:
            for fragment in sorted(helds):
                stack.enter_context(helds[fragment].changed)
            with self._changed:  # the layout may be another one since
                self._check_primary(fragments)
                if any(self._held.get(fragment) is not held for fragment, held in helds.items()):
                    raise _NotPrimary
            yield [helds[fragment] for fragment in fragments]

    def _check_primary(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self._backups(fragment)

    def _cut(self, message: Copied | Part, body: memoryview) -> dict[int, memoryview]:
        """Each fragment's bytes."""
        if isinstance(message, (Lay, Apply, Noted, Notes, Word, Ended)):
            return dict.fromkeys(message.fragments, body)
        bodies, at = {}, 0
        for fragment in message.fragments:
            held = self._made(fragment)
            if isinstance(held, Registry):
                raise ValueError("there are no values in the register")
            size = held.value.nbytes
            bodies[fragment] = body[at : at + size]
            at += size
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for fragments of {at}")
        return bodies

    def _await(self, fragment: int, held: Any, moment: Callable[[], bool]) -> None:
        """Under the fragment's lock."""

        def over() -> bool:
            return moment() or self._held.get(fragment) is not held or self._layout.holders[fragment][0] != self._number

        while not held.changed.wait_for(over, _LOOK_S):
            continue  # nobody wakes it when the layout changes
        if not moment():
            raise _NotPrimary

    def _made(self, fragment: int) -> Any:
        with self._changed:
            drawing = self._drawing
            if drawing is None or not 0 <= fragment < len(drawing.fragments) + bool(drawing.slots):
                raise ValueError(f"there is no fragment {fragment}")
            if fragment not in self._held:
                since = _since(self._layout, fragment, self._number)
                if fragment < len(drawing.fragments):
                    found = drawing.fragments[fragment]
                    dtype, behind = DTYPES[drawing.flats[found.flat]], BEHIND if _is_backup(drawing) else 0
                    self._held[fragment] = Held(found, dtype, drawing.optimizers, since, behind)
                else:
                    self._held[fragment] = Registry(parse(drawing.mode), drawing.slots, since)
            return self._held[fragment]


def _is_backup(drawing: Drawing) -> bool:
    return isinstance(parse(drawing.mode), Backup)


def _since(layout: Placed, fragment: int, server: int) -> int:
    """By which layout a server came to hold a fragment; 0: it does not."""
    holders = layout.holders[fragment]
    return layout.since[fragment][holders.index(server)] if server in holders else 0
