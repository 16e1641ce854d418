"""The workers of one term as a group whose gradients are added up at servers.

It is `Peers` to a strategy. Partial sums go to the servers; only the lanes, a few numbers, still go from worker
to worker, as at a reduce point of nothing. Each worker waits until the servers have every sum complete, and then meets the
others: whoever comes out of that meeting knows that nobody's part is missing. So a worker's death ends the term for all or for none, as in
any group, and whatever was sent for nothing is known to the servers already when it comes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.servers.calling import Reply
from paceline.servers.fragments import Fragment
from paceline.servers.held import as_bytes
from paceline.servers.holders import Holders
from paceline.servers.messages import Part, Sealed, Total
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Lanes, Memory, Parts, Peers, TermEnded
from paceline.tensors.tree import Plan, Range

NOTHING = Layout((), (), ())


class Sums:
    """This worker's memory, whoever its peers are: for its parts, and for what it fetches. Parts are `lent` where nobody
    changes them before the servers have answered."""

    def __init__(self, lent: bool) -> None:
        cpu = torch.device("cpu")
        self.parts, self.totals = Memory(cpu, lent), Memory(cpu)
        self.divisors: dict[int, float] = {}
        """Of each point of the step that was met."""


class ServedPeers:
    """`inner` are the workers; `check(seconds)` raises `TermEnded` once one of them is gone."""

    device, reads_late = torch.device("cpu"), True

    def __init__(
        self,
        inner: Peers,
        holders: Holders,
        fragments: Callable[[], Sequence[Fragment]],
        sums: Sums,
        check: Callable[[float], None],
    ) -> None:
        self._inner, self._holders, self._sums, self._check = inner, holders, sums, check
        self._fragments = fragments
        self.rank, self.size, self.ends_together = inner.rank, inner.size, inner.ends_together
        self.at = (0, 0)
        """Step and number of the reduce point in hand."""
        self._sent_before = holders.sent
        self.waits: dict[int, float] = {}
        """Seconds waited at this term's points, by the rank whose part came last."""

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    @property
    def sent_bytes(self) -> int:
        """To servers; the lanes that go to other workers are not among it."""
        return self._holders.sent - self._sent_before

    def open(self, plan: Plan, layout: Layout, lanes: int) -> None:
        self._take_memory(plan, layout)
        self._inner.open(plan, NOTHING, lanes)

    def _take_memory(self, plan: Plan, layout: Layout) -> None:
        self._plan = plan
        self._sums.parts.open(layout)
        self._sums.totals.open(layout)

    def parts(self) -> Parts:
        return [self._sums.parts.of(number) for number in range(len(self._plan.parts(self.rank)))]

    def post(self, bucket: int) -> None:
        return

    def repost(self, buckets: Sequence[int]) -> None:
        return

    def exchange(self, key: int, lanes: Lanes) -> NDArray[np.int64]:
        self._holders.through(self._meet_sums)
        return self._inner.exchange(key, lanes)

    def _meet_sums(self) -> None:
        self._push()
        self._await_sums()

    def _push(self) -> None:
        self._holders.wait(self._sent(range(len(self._fragments()))))

    def _sent(self, among: Iterable[int]) -> Iterator[Future[Reply]]:
        """This worker's parts of these fragments, as they are."""
        fragments, among = self._fragments(), list(among)
        for part, flats in zip(self._plan.parts(self.rank), self.parts(), strict=True):
            for batch in self._holders.batches(among):
                bodies = [stretch(flats, fragments[k]) for k in batch]
                yield self._holders.out(batch, self._part(part, batch), *bodies)

    def _part(self, part: Range, batch: list[int], coded: Sequence[int] = ()) -> Part:
        return Part(*self.at, self._plan.leaves, *part, batch, coded=list(coded))

    def _await_sums(self) -> None:
        step, call = self.at
        begun = time.monotonic()
        try:
            answers = self._holders.wait(
                (self._holders.back(mine, Sealed(step, call, mine, wait=True)) for mine in self._holders.of_each()),
                self._check,
            )
            self._note_wait(time.monotonic() - begun, answers[-1].message.last if answers else -1)
        except TermEnded:
            # Whoever is gone may have seen them complete before: then others may have gone on, and so must this one.
            answers = self._holders.wait(
                self._holders.out(mine, Sealed(step, call, mine, wait=False)) for mine in self._holders.of_each()
            )
            if not all(answer.message.yes for answer in answers):
                raise

    def _note_wait(self, seconds: float, last: int) -> None:
        """Most of a wait at one server is the wait at all of them: the one who was last is last everywhere."""
        whose = [rank for rank in range(self.size) if last in self._plan.leaves_of(rank)]
        for rank in whose:
            if rank != self.rank:
                self.waits[rank] = self.waits.get(rank, 0.0) + seconds

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        """Memory for the total, with the buffers' part in it; `fetch` brings the rest."""
        self._inner.total(call, divisor)
        return self._fetched(call, divisor)

    def _fetched(self, call: int, divisor: float) -> list[torch.Tensor]:
        self._sums.divisors[call] = divisor
        self.fetch(self.at[0], call, divisor, buffers=True)
        return self._sums.totals.of(call)

    def fetch(self, step: int, call: int, divisor: float, buffers: bool = False) -> None:
        """Of this step, or of the one before: what a script has accumulated is looked at late."""
        flats, holders = self._sums.totals.of(call), self._holders
        fragments = self._fragments()
        wanted = [number for number, fragment in enumerate(fragments) if fragment.buffers == buffers]

        def attempt() -> None:
            holders.wait(
                holders.begin_fetch(
                    wanted,
                    lambda batch: Total(step, call, divisor, batch),
                    lambda number: stretch(flats, fragments[number]),
                )
            )
            holders.end_fetch()

        holders.through(attempt)

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        return self._inner.gather(key, payload)

    def close(self) -> None:
        self._inner.close()


def stretch(flats: Sequence[torch.Tensor], fragment: Fragment) -> memoryview:
    """A fragment's bytes in flat memory."""
    return as_bytes(flats[fragment.flat][fragment.start : fragment.stop])
