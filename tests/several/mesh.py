"""A group over the simulated network: partial sums to the owner of each bucket, and their totals back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Parts, TermEnded
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan
from tests.several.world import World

CPU = torch.device("cpu")


class Mesh:
    """Strict: what a bucket held when it was posted is what the others get."""

    reads_late, ends_together, device, waited_s, sent_bytes = False, False, CPU, 0.0, 0

    def __init__(self, world: World, worker: int, term: int, members: tuple[int, ...]) -> None:
        self.rank, self.size = members.index(worker), len(members)
        self._world, self._worker, self._term, self._members = world, worker, term, members
        self._name, self._number = f"group-{term}", 0
        self._all_say("hello", None)

    def _send(self, to: int, tag: Any, value: Any) -> None:
        if to == self.rank:
            self._world.inbox(self._worker, self._name)[self._worker, tag] = value
        else:
            self._world.send(self._worker, self._members[to], self._name, tag, value)

    def _await(self, tags: Iterable[tuple[int, Any]], doing: str) -> list[Any]:
        """What these members have sent. A death ends the wait, and may do so even where all is there."""
        world, wanted = self._world, [(self._members[rank], tag) for rank, tag in tags]
        inbox = world.inbox(self._worker, self._name)

        def there() -> bool:
            return all(key in inbox for key in wanted)

        def ended() -> bool:
            return world.boards[self._worker].overtaken > self._term

        if world.wait(self._worker, there, f"{doing} in term {self._term}", ended):
            raise TermEnded(f"term {self._term} has ended")
        return [inbox[key] for key in wanted]

    def _all_say(self, tag: Any, value: Any) -> list[Any]:
        for to in range(self.size):
            self._send(to, tag, value)
        return self._await([(rank, tag) for rank in range(self.size)], f"{tag}")

    def _meet(self, tag: str, key: int, value: Any) -> list[Any]:
        said = self._all_say((tag, self._number), (key, value))
        assert {theirs for theirs, _ in said} == {key}, "the workers have come to different meetings"
        return [value for _, value in said]

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._plan, self._layout, self._number = plan, layout, self._number + 1
        assert len(plan.ranges) == self.size
        self._parts = [layout.allocate() for _ in plan.parts(self.rank)]

    def parts(self) -> Parts:
        return self._parts

    def post(self, bucket: int, kind: str = "part") -> None:
        at = self._layout.buckets[bucket]
        value = [part[at.flat][at.start : at.stop].clone() for part in self._parts]
        self._send(bucket % self.size, (kind, self._number, bucket), value)

    def repost(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self.post(bucket, "again")
        self._again = set(buckets)

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        self._again: set[int] = set()
        return np.stack(self._meet("lanes", key, lanes))

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        buckets, number = range(len(self._layout.buckets)), self._number
        for bucket in range(self.rank, len(buckets), self.size):
            kind = "again" if bucket in self._again else "part"
            parts = self._await([(rank, (kind, number, bucket)) for rank in range(self.size)], "parts")
            sources = [parts[worker][part] for worker, part in self._plan.owners]
            at = self._layout.buckets[bucket]
            out = torch.empty(at.stop - at.start, dtype=self._layout.flats[at.flat][0])
            TreeSum(sources, self._plan.roots[0].steps, [out]).add(divisor)
            for to in range(self.size):
                self._send(to, ("sum", number, bucket), out)
        sums = self._await([(bucket % self.size, ("sum", number, bucket)) for bucket in buckets], "sums")
        flats = self._layout.allocate()
        for at, value in zip(self._layout.buckets, sums, strict=True):
            flats[at.flat][at.start : at.stop] = value
        return flats

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self._number += 1
        return self._meet("say", key, payload)

    def trade(self, key: int, partner: int | None, payload: bytes) -> bytes:
        self._number += 1
        if partner is None:
            return b""
        self._send(partner, ("trade", self._number), (key, payload))
        ((theirs, came),) = self._await([(partner, ("trade", self._number))], f"('trade', {self._number})")
        assert theirs == key, "the workers have come to different meetings"
        return bytes(came)

    def close(self) -> None:
        return
