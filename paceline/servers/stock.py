"""What of a replica lies at the servers, as a worker sees it: its fragments, their values at the last pull, its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.carried import Carried, describe, hyper
from paceline.servers.coding import Coding
from paceline.servers.fragments import Fragment, cut
from paceline.servers.holders import Holders
from paceline.servers.messages import Centre, Drawing, Lay, Pull, State
from paceline.servers.optimizers import cut as cut_state
from paceline.servers.optimizers import join
from paceline.servers.peers import stretch
from paceline.servers.pieces import Piece
from paceline.servers.tables import FRAGMENTS, NOMINAL_BYTES, Table
from paceline.state.replica import Replica, load_optimizer
from paceline.tensors.layout import Layout
from paceline.tensors.snapshot import Snapshot


class Stock:
    """`mode` and `slots` are for workers that run at their own pace: see `Drawing`."""

    def __init__(
        self,
        holders: Holders,
        replica: Replica,
        layout: Layout,
        mode: str = "ps",
        slots: int = 0,
        tables: Sequence[Table] = (),
        centre: Centre | None = None,
        coding: Coding | None = None,
    ) -> None:
        self._holders, self._replica, self._layout = holders, replica, layout
        params, optimizers = replica.params, replica.optimizers
        self.fragments: tuple[Fragment, ...] = cut(layout, len(params))
        self.values = layout.allocate()
        """What the servers hold, as of the last pull; parameters, then buffers."""
        self.value_of = layout.views(self.values)
        # Where clients train apart, optimizers are theirs alone.
        self.carried: list[Carried] = [] if centre else [describe(optimizer, params) for optimizer in optimizers]
        _refuse_shared(self.carried)
        # With several optimizers a fragment may have the next one's step in it already: then that is not ours to take.
        self._incoming = self.values if len(optimizers) < 2 or slots else layout.allocate()
        self._incoming_of = layout.views(self._incoming)
        dtypes = [str(dtype) for dtype, _ in layout.flats]
        sizes = [fragment.nbytes(layout) for fragment in self.fragments]
        register = [1] if slots else []
        rows = [NOMINAL_BYTES] * FRAGMENTS * len(tables)
        drawing = Drawing(list(self.fragments), dtypes, self.carried, mode, slots, list(tables), centre, coding)
        holders.place(drawing, [*sizes, *register, *rows])

    def lay(self, count: int, register: bytes | None = None, beside: Sequence[Any] = ()) -> None:
        """Give the servers the values and the optimizers' state, after so many optimizer steps; and the register, if there
        is one. `beside`: of each fragment, what lies there instead of optimizers' state."""
        states = [optimizer.state_dict() for optimizer in self._replica.optimizers if self.carried]
        self._note_values()

        def attempt() -> None:
            calls = []
            for number, fragment in enumerate(self.fragments):
                found = beside[number] if beside else self._cut_states(states, fragment)
                state = [] if found is None else [memoryview(Snapshot(found).packed())]
                value = stretch(self.values, fragment)
                calls.append(self._holders.out([number], Lay([number], count), value, *state))
            if register is not None:
                number = len(self.fragments)
                calls.append(self._holders.out([number], Lay([number], count), memoryview(register)))
            self._holders.wait(calls)

        self._holders.through(attempt)

    def _cut_states(self, states: Sequence[dict[str, Any]], fragment: Fragment) -> list[Any] | None:
        if fragment.buffers or not self.carried:
            return None
        pieces = [self._pieces_of(carried, fragment) for carried in self.carried]
        return [cut_state(*each) for each in zip(states, self.carried, pieces, strict=True)]

    def _note_values(self) -> None:
        with torch.no_grad():
            tensors = [*self._replica.params, *self._replica.buffers]
            for value, tensor in zip(self.value_of, tensors, strict=True):
                value.copy_(tensor)

    @staticmethod
    def _pieces_of(carried: Carried, fragment: Fragment) -> list[Piece]:
        mine = {param for group in carried.groups for param in group.params}
        return [piece for piece in fragment.pieces if piece.param in mine and not fragment.buffers]

    def having(self, params: set[int]) -> Iterator[int]:
        """Fragments that hold any of these parameters."""
        for number, fragment in enumerate(self.fragments):
            if not fragment.buffers and any(piece.param in params for piece in fragment.pieces):
                yield number

    # values

    def pull_all(self, version: int) -> None:
        everything = range(len(self.fragments))
        self._holders.through(lambda: self._holders.wait(self.pull(everything, version)))
        self.take_pulled(range(len(self.value_of)))

    def look(self, version: int) -> list[torch.Tensor]:
        """The values that the servers hold now, after so many pushes or more, as they are; nothing is taken over."""
        flats = [torch.empty_like(flat) for flat in self.values]

        def attempt() -> None:
            self._holders.wait(
                self._holders.begin_fetch(
                    range(len(self.fragments)),
                    lambda batch: Pull(version, batch),
                    lambda k: stretch(flats, self.fragments[k]),
                )
            )
            self._holders.end_fetch()

        self._holders.through(attempt)
        return self._layout.views(flats)

    def pull(self, fragments: Iterable[int], version: int) -> list[Future[Reply]]:
        return self._holders.begin_fetch(
            fragments, lambda batch: Pull(version, batch), lambda k: stretch(self._incoming, self.fragments[k])
        )

    def take_pulled(self, tensors: Iterable[int]) -> None:
        self._holders.end_fetch()
        if self._incoming is not self.values:
            for index in tensors:
                self.value_of[index].copy_(self._incoming_of[index])

    # the optimizers' state

    @contextmanager
    def optimizers_filled(self) -> Iterator[None]:
        """Inside, the script's optimizers have their state, as if they had run here."""
        held: list[list[tuple[Piece, dict[str, Any]]]] = [[] for _ in self.carried]
        for number, fragment in enumerate(self.fragments):
            if not fragment.buffers:
                for known, carried, states in zip(held, self.carried, self._state_of(number), strict=True):
                    known.extend(zip(self._pieces_of(carried, fragment), states, strict=True))
        for optimizer, carried, mine in zip(self._replica.optimizers, self.carried, held, strict=True):
            load_optimizer(optimizer, join(carried, hyper(optimizer, carried), mine))
        yield
        self.empty_optimizers()

    def empty_optimizers(self) -> None:
        """Workers keep no state of an optimizer."""
        for optimizer in self._replica.optimizers:
            optimizer.state.clear()

    def beside(self) -> list[Any]:
        """Of each fragment, what lies there beside its values."""
        return [self._state_of(number) for number in range(len(self.fragments))]

    def _state_of(self, fragment: int) -> Any:
        holders = self._holders
        (reply,) = holders.through(lambda: holders.wait([holders.back([fragment], State(fragment))]))
        return Snapshot.read(reply.body).tree


def _refuse_shared(carried: Iterable[Carried]) -> None:
    held = [param for each in carried for group in each.groups for param in group.params if param is not None]
    if len(set(held)) < len(held):
        raise UsageError(
            "a parameter is in two optimizers: servers cannot tell whose turn it is; give each its own parameters"
        )
