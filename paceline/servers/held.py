"""One fragment at a server: its values, the sums of the last steps, its optimizers. No sockets, no other servers.

What happens to a fragment is a sequence of things said: values laid, a sum complete, an optimizer step, values that
the script has changed. All of it is computed from these alone, so a backup that is told the same has the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec
import torch

from paceline.servers.carried import DTYPES, Carried
from paceline.servers.coding import Excerpts
from paceline.servers.fragments import Fragment
from paceline.servers.messages import (
    ABSENT,
    BY_VALUE,
    Advance,
    Agreed,
    Apply,
    Ended,
    Lacking,
    Lay,
    Meet,
    Met,
    Part,
    RowPush,
    Stage,
    Summed,
    Update,
    Value,
    Word,
)
from paceline.servers.optimizers import Engine
from paceline.servers.parts import New, Parts
from paceline.tensors import lending
from paceline.tensors.encoding import seed_of
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Range, program

Said = Lay | Summed | Apply | Value | Stage | RowPush | Advance | Word | Ended
_KEPT_STEPS = 1
"""Where workers meet at every step, one may still ask for what came of the last step when another brings its next part."""


class Point:
    """The parts of one reduce point in one fragment, and their sum."""

    def __init__(self, leaves: int) -> None:
        self.leaves, self._parts = leaves, Parts(leaves)
        self._sums: dict[Range, torch.Tensor] = {}
        self._lanes: dict[Range, bytes] = {}
        self._summed: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        """Of all leaves, once it is known to all copies."""
        self.agreed = b""
        self.last = -1
        """A share of the part by which it was complete, where that part has come."""
        self.ended = 0
        """The term that is over at this point."""

    def add(self, part: Range, body: torch.Tensor, lanes: bytes = b"", borrowed: bool = True) -> torch.Tensor | None:
        """A part has come, and is copied if it is `borrowed` and must wait for others; the sum, if it is complete by that."""
        if self._summed is not None:
            return self._summed
        match self._parts.add(part):
            case New(drops):
                for drop in drops:
                    del self._sums[drop], self._lanes[drop]
                self._sums[part], self._lanes[part] = body, lanes
        cover = self._parts.cover()
        if cover is None:
            if borrowed and self._sums.get(part) is body:
                self._sums[part] = body.clone()
            return None
        sources = [self._sums[part] for part in cover]
        self.last, total = part[0], torch.empty_like(sources[0])
        TreeSum(sources, program(cover, (0, self.leaves)), [total]).add()
        self._summed, self._sums = total, {}
        return total

    def rows(self) -> list[bytes]:
        """The lanes of the parts, from left to right."""
        return [self._lanes[part] for part in sorted(self._lanes)]

    def lacking(self) -> list[int]:
        return [] if self.total is not None else [leaf for gap in self._parts.missing() for leaf in range(*gap)]

    def seal(self, total: torch.Tensor, agreed: bytes) -> None:
        self.total, self._summed, self._sums, self.agreed = total, None, {}, agreed


class Held:
    """`since` which layout this server holds it; a worker may be `behind` the others by so many steps. All methods are
    called under `changed`."""

    def __init__(
        self,
        fragment: Fragment,
        dtype: torch.dtype,
        optimizers: Sequence[Carried],
        since: int,
        behind: int = 0,
        excerpts: Excerpts | None = None,
    ) -> None:
        self._fragment, self._dtype, self.since, self._behind = fragment, dtype, since, behind
        self._excerpts = excerpts
        self.changed = threading.Condition()
        self.value = lending.zeros((fragment.stop - fragment.start,), dtype)
        self.version = -1
        """Optimizer steps that are in the values; -1: nothing was laid yet."""
        self._past: dict[int, torch.Tensor] = {}
        """The values of the last versions, this one's too, for workers that are behind."""
        self.words: dict[int, Word] = {}
        """Each worker's last."""
        self.points: dict[tuple[int, int], Point] = {}
        self._due: dict[int, bytes] = {}
        """Optimizer steps to come, by their count: encoded."""
        self._values: dict[tuple[int, bool], torch.Tensor] = {}
        self._staged: dict[tuple[int, int], torch.Tensor] = {}
        """By worker and its how-manieth push."""
        self._decoded: tuple[Stage, torch.Tensor] | None = None
        """The last one that came coded, until it is staged."""
        self._own: dict[int, torch.Tensor] = {}
        """Of each piece whose parameter has another type than the flat: its values in that."""
        self._engines: list[tuple[list[int], Engine]] = []
        for carried in [] if fragment.buffers else optimizers:
            mine = {param for group in carried.groups for param in group.params}
            numbers = [k for k, piece in enumerate(fragment.pieces) if piece.param in mine]
            pieces = [fragment.pieces[k] for k in numbers]
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

    def gradient(self, message: Part | Stage, body: memoryview) -> torch.Tensor:
        """A body of gradients: where it lies, or in new memory if it came coded; ValueError if it cannot be read."""
        if not message.coded:
            return self.read(body)
        if self._excerpts is None:
            raise ValueError("excerpts, and no codec")
        place = (message.step, message.call) if isinstance(message, Part) else (message.worker, message.own)
        return self._excerpts.read(body, message.coded, self._fragment, seed_of(*place))

    # what is said

    def point(self, message: Part | Summed | Ended | Meet | Lacking) -> Point:
        for old in [key for key in self.points if key[0] < message.step - _KEPT_STEPS - self._behind]:
            del self.points[old]
        point = self.points.setdefault((message.step, message.call), Point(message.leaves))
        if point.leaves != message.leaves:
            raise ValueError(f"{message.leaves} leaves at a point of {point.leaves}")
        return point

    def length(self, message: Said | Part, body: memoryview) -> int:
        """How many bytes of a body, which has other fragments' behind its own, are this one's."""
        if isinstance(message, RowPush):
            raise ValueError("rows for a fragment of parameters")
        return self.value.nbytes

    def knows(self, message: Said, body: memoryview) -> bool:
        """Whether this has been said before; ValueError if something else has."""
        match message:
            case Lay(_, version):
                return self.version >= max(version, 0)  # newer ones come where filling was broken off and begins again
            case Summed():
                return self.point(message).total is not None
            case Ended():
                point = self.point(message)
                return point.total is not None or point.ended >= message.term
            case Word(step, worker):
                return worker in self.words and self.words[worker].step >= step
            case Value():
                return message.count <= self.version or (message.count, message.weights) in self._values
            case Stage(worker, own):
                if any(key[0] == worker and key[1] >= own for key in self._staged):
                    return True
                if message.coded:  # nobody is told what cannot be read
                    self._decoded = message, self.gradient(message, body)
                return False
            case Apply():
                if self._due.get(message.count, body) != body:
                    raise ValueError(f"workers do not agree on optimizer step {message.count}")
                if message.count <= self.version or message.count in self._due:
                    return True
                _update(bytes(body))  # nobody is told what cannot be read
                return False
            case _:
                raise ValueError(f"a {type(message).__name__} of a fragment of parameters")

    def do(self, message: Said, body: memoryview) -> None:
        match message:
            case Lay(_, version):
                self._lay(version, body)
            case Summed():
                self.point(message).seal(self.read(body).clone(), message.agreed)
            case Ended():
                self.point(message).ended = message.term
            case Word(_, worker):
                self.words[worker] = message
            case Value():
                self._values[message.count, message.weights] = self.read(body).clone()
            case Stage(worker, own):
                known, self._decoded = self._decoded, None
                if known is None or known[0] is not message:
                    known = message, self.gradient(message, body)
                self._staged[worker, own] = known[1] if message.coded else known[1].clone()
            case Apply():
                self._due[message.count] = bytes(body)
        self._go_on()
        self.changed.notify_all()

    def seal(self, summed: Summed, total: torch.Tensor) -> None:
        """As to `do` it, with a total that is this fragment's to keep."""
        self.point(summed).seal(total, summed.agreed)
        self._go_on()
        self.changed.notify_all()

    def all_said(self) -> Iterator[tuple[Said, list[memoryview]]]:
        """What makes another copy the same as this one; without its number, which it does not know."""
        states = [] if self._fragment.buffers else [memoryview(self.states().packed())]
        for version in sorted(self._past.keys() - {self.version}):
            yield Lay([], version), [as_bytes(self._past[version])]
        yield Lay([], self.version), [as_bytes(self.value), *states]
        for (step, call), point in self.points.items():
            if point.total is not None:
                yield Summed(step, call, point.leaves, [], point.agreed), [as_bytes(point.total)]
            elif point.ended:
                yield Ended(step, call, point.leaves, point.ended, []), []
        for word in self.words.values():
            yield word, []
        for (count, weights), value in self._values.items():
            yield Value(count, weights, []), [as_bytes(value)]
        for (worker, own), staged in self._staged.items():
            yield Stage(worker, own, []), [as_bytes(staged)]
        for count, update in self._due.items():
            yield Apply(count, []), [memoryview(update)]

    def _lay(self, version: int, body: memoryview) -> None:
        self.value.copy_(self.read(body[: self.value.nbytes]))
        self._to_own(range(len(self._fragment.pieces)))
        rest = body[self.value.nbytes :]
        if len(rest):
            for (_, engine), states in zip(self._engines, Snapshot.read(rest).tree, strict=True):
                engine.restore(states)
        self._is_now(version)

    def _is_now(self, version: int) -> None:
        """The values are this version's."""
        self.version = version
        if self._behind:
            self._past[version] = self.value.clone()
            for old in [known for known in self._past if known < version - self._behind]:
                del self._past[old]

    def states(self) -> Snapshot:
        return Snapshot([engine.capture() for _, engine in self._engines])

    # what is asked

    def sealed(self, step: int, call: int) -> bool:
        point = self.points.get((step, call))
        return point is not None and point.total is not None

    def met(self, meet: Meet) -> Met:
        point = self.point(meet)
        return Met(point.ended >= meet.term, point.agreed, {worker: word.step for worker, word in self.words.items()})

    def agreement(self, part: Part) -> bytes:
        """What the sum that this part has completed is sealed with, or was."""
        point = self.point(part)
        if point.total is not None or not part.lanes:
            return point.agreed
        return msgspec.msgpack.encode(Agreed(point.rows(), self.words))

    def values(self, version: int) -> torch.Tensor:
        """After so many optimizer steps, which are done. Where nobody is behind, no more are."""
        if not self._behind:
            return self.value
        if version not in self._past:
            raise ValueError(f"version {version} of the values is not there any more; the newest is {self.version}")
        return self._past[version]

    def over(self, step: int, call: int, divisor: float) -> torch.Tensor:
        """The sum at a point over the divisor, in new memory."""
        point = self.points.get((step, call))
        if point is None or point.total is None:
            raise ValueError(f"the sum of step {step}, point {call} is not there")
        out = torch.empty_like(point.total)
        TreeSum([point.total], (), [out]).add(divisor)
        return out

    # the optimizer

    def _go_on(self) -> None:
        """Do the optimizer steps for which everything is there."""
        while (raw := self._due.get(self.version + 1)) is not None:
            count, update = self.version + 1, _update(raw)
            if not self._ready(count, update):
                return
            self._step(count, update)
            self._is_now(count)
            del self._due[count]
            for weights in (False, True):
                self._values.pop((count, weights), None)
            worker, own = update.push
            for key in list(self._staged):
                if key[0] in update.gone or (key[0] == worker and key[1] <= own):
                    del self._staged[key]

    def _ready(self, count: int, update: Update) -> bool:
        staged = update.push in self._staged
        if self._fragment.buffers:
            return staged or not update.moved
        params = {piece.param for piece in self._fragment.pieces}
        sources = {update.sources.get(param, ABSENT) for param in params}
        return (
            all(self.sealed(update.step, source) for source in sources if source >= 0)
            and (BY_VALUE not in sources or staged or (count, False) in self._values)
            and (params.isdisjoint(update.touched) or (count, True) in self._values)
        )

    def _step(self, count: int, update: Update) -> None:
        if self._fragment.buffers:
            if update.moved:
                self.value += self._staged[update.push]
            return
        numbers, engine = self._engines[update.optimizer]
        weights = self._values.get((count, True))
        if weights is not None:
            touched = [k for k, piece in enumerate(self._fragment.pieces) if piece.param in update.touched]
            for k in touched:
                self._stretch(self.value, k).copy_(self._stretch(weights, k))
            self._to_own(touched)
        flats = {BY_VALUE: self._staged.get(update.push, self._values.get((count, False)))}
        gradients: list[torch.Tensor | None] = []
        for k in numbers:
            source = update.sources.get(self._fragment.pieces[k].param, ABSENT)
            if source >= 0 and source not in flats:
                flats[source] = self.over(update.step, source, update.divisors[source])
            flat = flats.get(source)
            gradients.append(None if flat is None else self._stretch(flat, k))
        engine.apply(gradients, update.hyper)
        for k, own in self._own.items():
            self._stretch(self.value, k).copy_(own)

    def _to_own(self, numbers: Sequence[int]) -> None:
        for k in numbers:
            if k in self._own:
                self._own[k].copy_(self._stretch(self.value, k))


@lru_cache(maxsize=64)
def _update(raw: bytes) -> Update:
    """Each fragment hears of it."""
    return msgspec.msgpack.decode(raw, type=Update)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
