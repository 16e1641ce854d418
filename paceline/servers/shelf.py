"""What a server holds and does, without any socket: fragments, the sums of a step, the optimizer.

Calls come from many threads, one a connection. Each fragment has its own lock, so that one is added up while
another one is still being sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from paceline.servers.carried import DTYPES, Carried
from paceline.servers.fragments import Fragment
from paceline.servers.messages import (
    ABSENT,
    BY_VALUE,
    Apply,
    Call,
    Done,
    Lay,
    Outline,
    Part,
    Pull,
    Sealed,
    State,
    Total,
    Value,
)
from paceline.servers.optimizers import Engine
from paceline.servers.parts import New, Parts
from paceline.servers.pieces import Piece
from paceline.state.snapshot import Snapshot
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Range, program

Answer = tuple[msgspec.Struct, Sequence[memoryview]]
_KEPT_STEPS = 1
"""A worker may be so many steps behind another one: what it still asks for is kept."""


class _Point:
    """The parts of one reduce point in one fragment, and their sum."""

    def __init__(self, leaves: int) -> None:
        self.leaves, self._parts = leaves, Parts(leaves)
        self._sums: dict[Range, torch.Tensor] = {}
        self.total: torch.Tensor | None = None
        """Of all leaves, once it is known."""

    def add(self, part: Range, body: torch.Tensor) -> None:
        if self.total is not None:
            return
        match self._parts.add(part):
            case New(drops):
                for drop in drops:
                    del self._sums[drop]
                self._sums[part] = body.clone()
        cover = self._parts.cover()
        if cover is not None:
            sources = [self._sums[part] for part in cover]
            self.total = torch.empty_like(sources[0])
            TreeSum(sources, program(cover, (0, self.leaves)), [self.total]).add()
            self._sums = {}


class _Held:
    """One fragment, with its optimizers."""

    def __init__(self, fragment: Fragment, dtype: torch.dtype, optimizers: Sequence[Carried]) -> None:
        self._fragment, self._dtype = fragment, dtype
        self.changed = threading.Condition()
        self.value = torch.zeros(fragment.stop - fragment.start, dtype=dtype)
        self.version = -1
        """Optimizer steps that are in the values; -1: nothing was laid yet."""
        self.points: dict[tuple[int, int], _Point] = {}
        self._due: dict[int, Apply] = {}
        self._values: dict[tuple[int, bool], torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}
        """Of each piece whose parameter has another type than the flat: its values in that."""
        self._engines: list[tuple[list[int], Engine]] = []
        for carried in [] if fragment.buffers else optimizers:
            mine = {param for group in carried.groups for param in group.params}
            numbers = [k for k, piece in enumerate(fragment.pieces) if piece.param in mine]
            pieces = [Piece(p.param, p.lo, p.hi) for p in (fragment.pieces[k] for k in numbers)]
            memory = [self._memory(k, DTYPES[carried.laid[fragment.pieces[k].param].dtype]) for k in numbers]
            self._engines.append((numbers, Engine(carried, pieces, memory)))

    def _memory(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        view = self._stretch(self.value, number)
        if dtype == view.dtype:
            return view
        return self._own.setdefault(number, torch.zeros(len(view), dtype=dtype))

    def _stretch(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        piece = self._fragment.pieces[number]
        return flat[piece.at : piece.at + piece.hi - piece.lo]

    def read(self, body: memoryview) -> torch.Tensor:
        """A body as a stretch of this fragment; ValueError if it is none."""
        if len(body) != self.value.nbytes:
            raise ValueError(f"{len(body)} bytes for a fragment of {self.value.nbytes}")
        return torch.frombuffer(body, dtype=self._dtype)

    # what is said; always under the lock

    def lay(self, version: int, body: memoryview) -> None:
        if self.version >= 0:
            return
        self.value.copy_(self.read(body[: self.value.nbytes]))
        self._to_own(range(len(self._fragment.pieces)))
        rest = body[self.value.nbytes :]
        if len(rest):
            for (_, engine), states in zip(self._engines, Snapshot.read(rest).tree, strict=True):
                engine.restore(states)
        self.version = version
        self.changed.notify_all()

    def states(self) -> Snapshot:
        return Snapshot([engine.capture() for _, engine in self._engines])

    def part(self, message: Part, body: memoryview) -> None:
        for old in [key for key in self.points if key[0] < message.step - _KEPT_STEPS]:
            del self.points[old]
        point = self.points.setdefault((message.step, message.call), _Point(message.leaves))
        if point.leaves != message.leaves:
            raise ValueError(f"{message.leaves} leaves at a point of {point.leaves}")
        point.add((message.a, message.b), self.read(body))
        if point.total is not None:
            self._go_on()
            self.changed.notify_all()

    def sealed(self, step: int, call: int) -> bool:
        point = self.points.get((step, call))
        return point is not None and point.total is not None

    def over(self, step: int, call: int, divisor: float) -> torch.Tensor:
        """The sum at a point over the divisor, in new memory."""
        point = self.points.get((step, call))
        if point is None or point.total is None:
            raise ValueError(f"the sum of step {step}, point {call} is not there")
        out = torch.empty_like(point.total)
        TreeSum([point.total], (), [out]).add(divisor)
        return out

    def take(self, message: Value, body: memoryview) -> None:
        if message.count > self.version and (message.count, message.weights) not in self._values:
            self._values[message.count, message.weights] = self.read(body).clone()
            self._go_on()

    def apply(self, message: Apply) -> None:
        if message.count > self.version:
            if self._due.setdefault(message.count, message) != message:
                raise ValueError(f"workers do not agree on optimizer step {message.count}")
            self._go_on()

    def _go_on(self) -> None:
        """Do the optimizer steps for which everything is there."""
        while (message := self._due.get(self.version + 1)) is not None and self._ready(message):
            del self._due[message.count]
            self._step(message)
            self.version = message.count
            for weights in (False, True):
                self._values.pop((message.count, weights), None)
            self.changed.notify_all()

    def _ready(self, message: Apply) -> bool:
        params = {piece.param for piece in self._fragment.pieces}
        sources = {message.sources.get(param, ABSENT) for param in params}
        return (
            all(self.sealed(message.step, source) for source in sources if source >= 0)
            and (BY_VALUE not in sources or (message.count, False) in self._values)
            and (params.isdisjoint(message.touched) or (message.count, True) in self._values)
        )

    def _step(self, message: Apply) -> None:
        if not self._engines:
            return
        numbers, engine = self._engines[message.optimizer]
        weights = self._values.get((message.count, True))
        if weights is not None:
            touched = [k for k, piece in enumerate(self._fragment.pieces) if piece.param in message.touched]
            for k in touched:
                self._stretch(self.value, k).copy_(self._stretch(weights, k))
            self._to_own(touched)
        flats = {BY_VALUE: self._values.get((message.count, False))}
        gradients: list[torch.Tensor | None] = []
        for k in numbers:
            source = message.sources.get(self._fragment.pieces[k].param, ABSENT)
            if source >= 0 and source not in flats:
                flats[source] = self.over(message.step, source, message.divisors[source])
            flat = flats.get(source)
            gradients.append(None if flat is None else self._stretch(flat, k))
        engine.apply(gradients, message.hyper)
        for k, own in self._own.items():
            self._stretch(self.value, k).copy_(own)

    def _to_own(self, numbers: Sequence[int]) -> None:
        for k in numbers:
            if k in self._own:
                self._own[k].copy_(self._stretch(self.value, k))


class Shelf:
    """All that one server holds."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._outline: Outline | None = None
        self._lock = threading.Lock()

    def handle(self, message: Call, body: memoryview) -> Answer:
        """ValueError: the caller is wrong. Some calls wait: each caller has a thread of its own."""
        match message:
            case Outline():
                with self._lock:
                    self._outline = self._outline or message
            case Lay():
                return self._with(self._made(message.fragment), lambda held: held.lay(message.version, body))
            case Part():
                return self._with(self._of(message.fragment), lambda held: held.part(message, body))
            case Value():
                return self._with(self._of(message.fragment), lambda held: held.take(message, body))
            case Apply():
                for held in list(self._held.values()):
                    self._with(held, lambda held: held.apply(message))
            case Sealed():
                return Done(all(self._is_sealed(fragment, message) for fragment in message.fragments)), ()
            case Total():
                held = self._of(message.fragment)
                with held.changed:
                    return Done(), (_bytes(held.over(message.step, message.call, message.divisor)),)
            case Pull():
                held = self._of(message.fragment)
                with held.changed:
                    held.changed.wait_for(lambda: held.version >= message.version)
                    # Nobody changes it before this worker has brought its part of the next step.
                    return Done(), (_bytes(held.value),)
            case State():
                held = self._of(message.fragment)
                with held.changed:
                    return Done(), (memoryview(held.states().packed()),)
        return Done(), ()

    def _made(self, fragment: int) -> _Held:
        with self._lock:
            if self._outline is None or not 0 <= fragment < len(self._outline.fragments):
                raise ValueError(f"there is no fragment {fragment}")
            if fragment not in self._held:
                found = self._outline.fragments[fragment]
                dtype = DTYPES[self._outline.flats[found.flat]]
                self._held[fragment] = _Held(found, dtype, self._outline.optimizers)
            return self._held[fragment]

    def _of(self, fragment: int) -> _Held:
        held = self._held.get(fragment)
        if held is None:
            raise ValueError(f"fragment {fragment} is not held here")
        return held

    @staticmethod
    def _with(held: _Held, do: Callable[[_Held], None]) -> Answer:
        with held.changed:
            do(held)
        return Done(), ()

    def _is_sealed(self, fragment: int, message: Sealed) -> bool:
        held = self._of(fragment)
        with held.changed:
            if message.wait:
                held.changed.wait_for(lambda: held.sealed(message.step, message.call))
            return held.sealed(message.step, message.call)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())
