"""One fragment at a server where clients train apart: θ, the outer optimizer's state, and what clients have brought.

As of `Held`, all of it is computed from what is said alone, so a backup that is told the same has the same bits. What a client
brings is kept by its place in the round, and added up when the round is over, in one tree: in which order clients came
changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from paceline.servers.fragments import Fragment
from paceline.servers.held import as_bytes
from paceline.servers.messages import Apply, Bring, Lay
from paceline.servers.outer import SGD, AnyOuter
from paceline.servers.rounds import Closed
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import program

Said = Lay | Bring | Apply


class HeldCentre:
    """`since` which layout this server holds it. All methods are called under `changed`."""

    def __init__(self, fragment: Fragment, dtype: torch.dtype, outer: AnyOuter, since: int) -> None:
        self.since, self.changed = since, threading.Condition()
        self.value = torch.zeros(fragment.stop - fragment.start, dtype=dtype)
        self.version = -1
        """Rounds that are in θ; -1: nothing was laid yet."""
        self._outer = SGD() if fragment.buffers else outer  # buffers are averaged, whatever the parameters do
        self._state = self._outer.begin(self.value)
        self._steps = 0
        """Of the outer optimizer: a round to which nobody came has none."""
        self._brought: dict[tuple[int, int], torch.Tensor] = {}
        """By round and leaf."""

    def read(self, body: memoryview) -> torch.Tensor:
        if len(body) != self.value.nbytes:
            raise ValueError(f"{len(body)} bytes for a fragment of {self.value.nbytes}")
        return torch.frombuffer(body, dtype=self.value.dtype)

    def length(self, message: Said, body: memoryview) -> int:
        return self.value.nbytes

    # what is said

    def knows(self, message: Said, body: memoryview) -> bool:
        match message:
            case Lay(_, version):
                return self.version >= max(version, 0)
            case Bring(number, leaf):
                return number < self.version or (number, leaf) in self._brought
            case Apply(count):
                if count > self.version:
                    self._check(count, _closed(body))
                return count <= self.version
        raise ValueError(f"a {type(message).__name__} of a fragment that clients are averaged in")

    def _check(self, count: int, closed: Closed) -> None:
        if count != self.version + 1:
            raise ValueError(f"round {count - 1} is over, and {self.version} rounds are in θ")
        if missing := [leaf for leaf, _ in closed.arrived if (count - 1, leaf) not in self._brought]:
            raise ValueError(f"of round {count - 1}, what clients {missing} have brought is not here")

    def do(self, message: Said, body: memoryview) -> None:
        match message:
            case Lay(_, version):
                self.value.copy_(self.read(body[: self.value.nbytes]))
                if len(body) > self.value.nbytes:
                    self._restore(Snapshot.read(body[self.value.nbytes :]).tree)
                self.version = version
            case Bring(number, leaf):
                self._brought[number, leaf] = self.read(body).clone()
            case Apply(count):
                self._end_round(count, _closed(body))
        self.changed.notify_all()

    def all_said(self) -> Iterator[tuple[Said, list[memoryview]]]:
        yield Lay([], self.version), [as_bytes(self.value), memoryview(self.states().packed())]

    def _end_round(self, count: int, closed: Closed) -> None:
        if closed.arrived:
            parts = [self._brought[count - 1, leaf].mul_(samples) for leaf, samples in closed.arrived]
            delta, places = torch.empty_like(self.value), tuple((k, k + 1) for k in range(len(parts)))
            TreeSum(parts, program(places, (0, len(parts))), [delta]).add(float(sum(n for _, n in closed.arrived)))
            self._steps += 1
            self._outer.step(self.value, delta, self._state, self._steps)
        self.version = count
        self._brought = {key: value for key, value in self._brought.items() if key[0] >= count}

    # what is asked

    def values(self, version: int) -> torch.Tensor:
        return self.value

    def states(self) -> Snapshot:
        """All that is here beside θ."""
        brought = [[*key, value] for key, value in self._brought.items()]
        return Snapshot({"state": self._state, "steps": self._steps, "brought": brought})

    def _restore(self, tree: dict[str, Any]) -> None:
        self._steps = tree["steps"]
        self._state = {name: tree["state"][name].clone() for name in self._outer.states}
        self._brought = {(number, leaf): value.clone() for number, leaf, value in tree["brought"]}


def _closed(body: memoryview) -> Closed:
    return msgspec.msgpack.decode(body, type=Closed)
