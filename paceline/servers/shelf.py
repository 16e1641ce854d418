"""What a server does with what it is told of parameters: it holds fragments as their primary, or as a backup of another
server (`copying`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.servers import serving
from paceline.servers.carried import DTYPES
from paceline.servers.clocks import BEHIND, Backup, RowsBehind, may_read, parse
from paceline.servers.coding import Excerpts
from paceline.servers.copying import LOOK_S, Answered, Copying, NotPrimary
from paceline.servers.held import Held, Point, Said, as_bytes
from paceline.servers.held_centre import HeldCentre
from paceline.servers.held_rows import HeldRows
from paceline.servers.lines import Line
from paceline.servers.messages import (
    Abreast,
    Advance,
    Apply,
    Asking,
    Begin,
    Bring,
    Call,
    Done,
    Drawing,
    Ended,
    Enter,
    Gathered,
    Had,
    Hold,
    Lacking,
    Lacks,
    Lay,
    Lost,
    Meet,
    Noted,
    Notes,
    Ongoing,
    Outline,
    Part,
    Pull,
    Push,
    RowPush,
    Rows,
    Sealed,
    Stage,
    State,
    Summed,
    Survey,
    Surveyed,
    Total,
    Turn,
    Unheard,
    Value,
    Word,
)
from paceline.servers.registry import Answer, Registry
from paceline.servers.round_registry import RoundRegistry
from paceline.servers.row_optimizers import Block
from paceline.servers.tables import FRAGMENTS, packed_size
from paceline.tensors.channel import left_alone

Copied = Said | Bring | Noted | Notes
Dial = Callable[[str], Line]
Told = Callable[[int, dict[int, int]], None]


class Shelf(Copying[Any]):
    """Of `Held` (of `HeldCentre` where clients train apart), and of the `Registry` where workers go at their own pace: all
    know, do and tell what is said.

    `settling`: a thread of its own calls `keep_settling`."""

    _drawing: Drawing | None = None
    _drawn = b""
    """The same, encoded."""
    _excerpts: Excerpts | None = None
    """How gradients come coded, if they may."""

    def __init__(
        self, number: int = 0, dial: Dial | None = None, told: Told | None = None, settling: bool = False
    ) -> None:
        super().__init__(number, dial, told)
        self._settling = settling
        self._due: queue.SimpleQueue[HeldRows | None] = queue.SimpleQueue()
        """For each update that is to be taken into rows beside the calls, whose."""
        self._calm, self._readers = threading.Condition(), 0
        """How many reads of rows are being answered."""

    @property
    def _begun(self) -> bool:
        return self._drawing is not None

    def _introduce(self, line: Line) -> None:
        line.call(Outline(), memoryview(self._drawn))

    # calls

    def handle(self, message: Call, body: memoryview) -> Answered:
        if not isinstance(message, Outline):
            return super().handle(message, body)
        with self._changed:
            if self._drawing is None:
                self._drawn = bytes(body)
                drawing = msgspec.msgpack.decode(self._drawn, type=Drawing)
                if drawing.coding is not None:
                    self._excerpts = Excerpts(drawing.coding, drawing.fragments)
                self._drawing = drawing
                self._changed.notify_all()
        return Done(), ()

    def _answer(self, call: msgspec.Struct, body: memoryview, by: int) -> Answered:
        match call:
            case Lay() | Value() | Apply() | Stage() | Bring() | Notes() | RowPush() | Advance() | Word():
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
                points = [self._sealed(fragment, call) for fragment in call.fragments]
                last = points[-1].last if points and points[-1] is not None else -1
                return Done(None not in points, last), ()
            case Total(step, point, divisor, fragments):
                with self._locked(fragments) as helds:
                    return Done(), [as_bytes(held.over(step, point, divisor)) for held in helds]
            case Pull(version, fragments):
                return serving.Answer(Done(), [as_bytes(self._pulled(k, version)) for k in fragments], left_alone)
            case Begin() | Enter() | Ongoing() | Turn() | Push() | Lost() | Had() | Unheard() | Hold():
                return self._register(call, body)
            case State(fragment):
                with self._locked([fragment]) as (held,):
                    return Done(), (memoryview(held.states().packed()),)
            case Rows():
                with self._reading():
                    found = list(self._gathered(call, body, by))
                return Gathered([version for version, _ in found]), [
                    rows.reshape(-1).view(np.uint8).data for _, rows in found
                ]
            case Survey():
                return Done(), (memoryview(msgspec.msgpack.encode(list(self._surveyed(call, by)))),)
        return Done(), ()

    def _hear(self, said: Said | Bring | Notes, body: memoryview) -> None:
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
        brought = {k: self._made(k).gradient(part, mine) for k, mine in self._cut(part, body).items()}
        with self._locked(part.fragments) as helds:
            complete: dict[int, tuple[Held, torch.Tensor]] = {}
            for k, held in zip(part.fragments, helds, strict=True):
                point = held.point(part)
                total = point.total
                if total is None:
                    total = point.add((part.a, part.b), brought[k], part.lanes, borrowed=not part.coded)
                if total is not None:
                    complete[k] = held, total
            agreed = complete[0][0].agreement(part) if 0 in complete else b""
            summed = Summed(part.step, part.call, part.leaves, list(complete), agreed)
            self._tell(summed, {k: as_bytes(total) for k, (_, total) in complete.items()})
            for held, total in complete.values():
                held.seal(summed, total)

    def _sealed(self, fragment: int, asked: Sealed) -> Point | None:
        """The point, if its sum is complete."""
        with self._locked([fragment]) as (held,):
            if asked.wait:
                self._await(fragment, held, lambda: held.sealed(asked.step, asked.call))
            point: Point | None = held.points[asked.step, asked.call] if held.sealed(asked.step, asked.call) else None
            return point

    def _meet(self, asked: Meet | Abreast) -> Answered:
        with self._locked([0]) as (held,):
            if isinstance(asked, Abreast):
                words = held.words

                def there() -> bool:
                    return all(worker in words and words[worker].step >= asked.step for worker in asked.workers)

                return Done(held.changed.wait_for(there, LOOK_S)), ()
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

    def _gathered(self, asked: Rows, body: memoryview, by: int) -> Iterator[tuple[int, Block]]:
        """One fragment at a time: the next may still wait for its update."""
        at = 0
        for fragment in asked.fragments:
            size = packed_size(body[at:], dim=0)
            with self._rows_at(by, fragment, asked.count, asked.most) as held:
                yield held.version, held.gather(body[at : at + size])
            at += size

    def _surveyed(self, asked: Survey, by: int) -> Iterator[Surveyed]:
        for fragment in asked.fragments:
            with self._rows_at(by, fragment, asked.count) as held:
                yield held.survey(asked.hashed)

    @contextmanager
    def _rows_at(self, by: int, fragment: int, count: int, most: int = 0) -> Iterator[HeldRows]:
        """A fragment of rows, once so many updates are in it, or all but so many of them.

        Who asks by an older layout is not kept waiting. Its update may have been refused, for another of its fragments is not
        led here any more, and be said again behind this, on the same line."""
        with self._locked([fragment]) as (held,):
            if not isinstance(held, HeldRows):
                raise ValueError(f"fragment {fragment} has no rows")

            def there() -> bool:
                held.settle(count - most)  # what was said is taken in here rather than waited for
                return may_read(most, count, held.version).go

            self._await(fragment, held, there, by)
            yield held

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._calm:
            self._readers += 1
        try:
            yield
        finally:
            with self._calm:
                self._readers -= 1
                self._calm.notify_all()

    def keep_settling(self) -> None:
        """Take updates into rows, beside the calls; until `end_settling`."""
        over = False
        while not over:
            batch = [self._due.get()]
            if batch[0] is not None:
                with batch[0].changed:
                    pass  # at a primary: until the update was said of all its fragments
            while not self._due.empty():
                batch.append(self._due.get())
            over = None in batch
            # From the last one on: who reads or pushes begins with the first, so the two are in each other's way once. In the
            # same order it would follow from fragment to fragment, and wait for all of the update.
            for held in reversed(batch):
                with self._calm:  # a worker waits for its read, and nobody for this
                    self._calm.wait_for(lambda: not self._readers, LOOK_S)
                if held is not None:
                    with held.changed:
                        held.settle(held.version + 1)

    def end_settling(self) -> None:
        self._due.put(None)

    def _register(self, call: Asking, body: memoryview) -> Answered:
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
                registry.changed.wait(LOOK_S)
                if self._held.get(number) is not registry:
                    raise NotPrimary
                self._check_primary([number])

    def _cut(self, message: Copied | Part, body: memoryview) -> dict[int, memoryview]:
        """Each fragment's bytes."""
        if isinstance(message, (Lay, Apply, Noted, Notes, Advance, Word, Ended)) or _is_coded(message):
            return dict.fromkeys(message.fragments, body)
        bodies, at = {}, 0
        for fragment in message.fragments:
            held = self._made(fragment)
            if isinstance(held, Registry):
                raise ValueError("there are no values in the register")
            size = held.length(message, body[at:])
            bodies[fragment] = body[at : at + size]
            at += size
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for fragments of {at}")
        return bodies

    def _await(self, fragment: int, held: Any, moment: Callable[[], bool], by: int | None = None) -> None:
        """Under the fragment's lock. `by`: not beyond this layout."""

        def over() -> bool:
            layout = self._layout
            elsewhere = self._held.get(fragment) is not held or layout.holders[fragment][0] != self._number
            return moment() or elsewhere or (by is not None and layout.number > by)

        while not held.changed.wait_for(over, LOOK_S):
            continue  # nobody wakes it when the layout changes
        if not moment():
            raise NotPrimary

    def _joined(self, said: Copied, bodies: Sequence[memoryview]) -> Sequence[memoryview]:
        """What is said of all fragments together has one body."""
        return bodies[:1] if isinstance(said, (Apply, Advance)) or _is_coded(said) else bodies

    def _new(self, fragment: int, since: int) -> Held | HeldRows | HeldCentre | Registry:
        drawing = self._drawing
        if drawing is None or not 0 <= fragment < drawing.first_row_fragment + FRAGMENTS * len(drawing.tables):
            raise ValueError(f"there is no fragment {fragment}")
        if fragment >= drawing.first_row_fragment:
            table = (fragment - drawing.first_row_fragment) // FRAGMENTS
            mode = parse(drawing.mode)
            most = mode.most if self._settling and isinstance(mode, RowsBehind) else 0
            return HeldRows(table, drawing.tables[table], since, fragment, most, self._due.put)
        if fragment >= len(drawing.fragments):
            if drawing.centre is not None:
                return RoundRegistry(drawing.centre, since)
            return Registry(parse(drawing.mode), drawing.slots, since)
        found = drawing.fragments[fragment]
        if drawing.centre is not None:
            return HeldCentre(found, DTYPES[drawing.flats[found.flat]], drawing.centre.outer, since)
        behind = BEHIND if isinstance(parse(drawing.mode), Backup) else 0
        return Held(found, DTYPES[drawing.flats[found.flat]], drawing.optimizers, since, behind, self._excerpts)


def _is_coded(message: Copied | Part) -> bool:
    return isinstance(message, (Part, Stage)) and bool(message.coded)
