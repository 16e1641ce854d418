"""What workers that run at their own pace have done, and have in hand: the one place that knows. Pure: no clock, no sockets.

Such workers meet nobody within a stretch, which is one loop over a loader. What they must agree on is in a register, which lies at a server as a fragment
does, with a backup that is told first:

    which micro-batches of the stretch are done; who has which in hand, a lease
    the order of pushes: each is counted once, and gets the next number; servers apply them in that order
    everybody's clock, and so who may go on
    receipts, step by step as their micro-batches are done

A micro-batch is one slot's share of one step: number = step * slots + slot. A push is named by the micro-batch it came
from and its place among that one's optimizer steps, so it counts once, whoever computes it again after a death. A
lease ends with its worker: what it had in hand is given to another one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Self

import msgspec

from paceline.data.receipts import OWN_DRAWS, signed
from paceline.servers.applied import Applied
from paceline.servers.clocks import Kept

AGAIN = 0
"""In the place of a push's number: it has been counted before, from another worker."""


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """A micro-batch, or several, and what it was made of."""

    number: int
    samples: int
    ids: int
    digest: int
    weight: int = 0
    moved: int = 0
    """Where clients train apart: the samples that the client has, and bytes that went to and from the servers for it."""


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """A push in the order of all: by whom, the how-manieth of its own, and the optimizer step in an encoded `Update`."""

    count: int
    worker: int
    own: int
    update: bytes


class Receipt(msgspec.Struct, array_like=True):
    """What has come in of one step."""

    step: int
    epoch: int
    loader: int
    batch: int
    """Which of the loader's batches in this epoch; with own draws, how many shares the step is cut into."""
    parts: int = 0
    samples: int = 0
    ids: int = 0
    digest: int = 0


class Register(msgspec.Struct):
    """
    >>> register = Register(slots=2)
    >>> register.begin(stretch=0, total=3)
    >>> for worker in (0, 1):
    ...     register.enter(worker)
    >>> register.lease(0, 1), register.lease(1, 2), register.lease(0, 1)
    ([0], [1, 2], [0])
    >>> register.push(1, own=1, number=1, call=0, update=b"")
    1
    >>> register.lose(1)  # what it had in hand is given to another; what it had pushed is not pushed again
    >>> register.lease(0, 3), register.push(0, own=1, number=1, call=0, update=b"")
    ([0, 1, 2], 0)
    """

    slots: int
    stretch: int = -1
    total: int = 0
    """Micro-batches of the stretch."""
    first: int = 0
    """The step with which it begins."""
    epoch: int = 0
    loader: int = OWN_DRAWS
    """What it is about, for receipts."""
    count: int = 0
    """Pushes counted."""
    done: Applied = msgspec.field(default_factory=Applied)
    fresh: int = 0
    """The first micro-batch that nobody has had."""
    back: list[int] = []
    """Those that were given back, in order."""
    held: dict[int, list[int]] = {}
    """What each worker has in hand."""
    calls: dict[int, int] = {}
    """Of micro-batches that are not done, how many of their pushes have been counted."""
    pushed: dict[int, tuple[int, int]] = {}
    """Each worker's last push, also of those who are gone: its own number for it, and what was answered."""
    log: list[Counted] = []
    """Pushes that some server may not have heard of."""
    trainers: list[int] = []
    """Who has entered and is not gone."""
    left: list[int] = []
    """Of these, whose scripts have left the stretch before its end."""
    gone: list[int] = []
    clocks: Kept = msgspec.field(default_factory=Kept)
    open: dict[int, Receipt] = {}
    """Of steps of which something is done, or all that comes before is not."""
    receipts: list[Receipt] = []
    """Of whole steps, one after the other, that main may not have written yet."""
    steps: int = 0
    """Steps that are whole, without a gap."""
    samples: int = 0
    stop: int = 0
    """A wish to stop, by its code; and whose it is."""
    stopper: int = -1
    keeper: int = -1
    """Who has everything held for a checkpoint."""

    # a stretch

    def begin(self, stretch: int, total: int, epoch: int = 0, loader: int = OWN_DRAWS, last: int = 0) -> None:
        """Said by everybody, and the same by all of one life; the first one begins it. With `last` it ends with so many steps
        of the run at the latest. In a run that is resumed that may have been put further away in the middle of it, or nearer:
        what is counted or in hand stays part of it."""
        if stretch < self.stretch:
            return
        if stretch > self.stretch:
            self.stretch, self.total, self.first = stretch, 0, self.steps
            self.epoch, self.loader = epoch, loader
            self.fresh, self.back, self.held, self.calls, self.open = 0, [], {}, {}, {}
            self.done, self.left = Applied(), []
        room = max(0, last - self.first) * self.slots if last else total
        least = min(total, room)
        while self.fresh > least and self.back[-1:] == [self.fresh - 1] and self.back[-1] not in self.calls:
            self.fresh = self.back.pop()  # given back with nothing of it counted: as if nobody had had it
        self.total = max(self.fresh, least)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do in this stretch."""
        nobody = bool(self.trainers) and set(self.trainers) <= set(self.left)
        if (self.stop or nobody) and not any(self.held.values()):
            return True
        return self.done.done(self.stretch, self.total)

    def enter(self, worker: int) -> None:
        if worker not in self.trainers and worker not in self.gone:
            insort(self.trainers, worker)

    def lose(self, worker: int) -> None:
        """It is dead and reaped. What it has staged and nobody has counted will never be."""
        if worker in self.gone:
            return
        insort(self.gone, worker)
        if worker in self.trainers:
            self.trainers.remove(worker)
        self.give_back(worker)
        if self.keeper == worker:
            self.keeper = -1

    # micro-batches

    def lease(self, worker: int, want: int) -> list[int]:
        """What a worker has in hand from now on, `want` of them if there are so many; asked again, it is the same."""
        if worker in self.gone or worker not in self.trainers:
            return []
        mine = self.held.setdefault(worker, [])
        while len(mine) < want and not self.stop:
            if self.back:
                mine.append(self.back.pop(0))
            elif self.fresh < self.total:
                mine.append(self.fresh)
                self.fresh += 1
            else:
                break
        return mine

    def give_back(self, worker: int) -> None:
        for number in self.held.pop(worker, []):
            insort(self.back, number)

    def finish(self, worker: int, delivered: Sequence[Delivered]) -> bool:
        """These are done, unless they were before; whether that is news."""
        news = False
        for each in delivered:
            if not 0 <= each.number < self.total:
                raise ValueError(f"micro-batch {each.number} of a stretch of {self.total}")
            if worker in self.held and each.number in self.held[worker]:
                self.held[worker].remove(each.number)
            if worker in self.gone or not self.done.add((self.stretch, each.number)):
                continue
            news = True
            self.calls.pop(each.number, None)
            self._receipt(each)
        return news

    def _receipt(self, each: Delivered) -> None:
        step = self.step_of(each.number)
        batch = self.slots if self.loader == OWN_DRAWS else step - self.first
        receipt = self.open.setdefault(step, Receipt(step, self.epoch, self.loader, batch))
        receipt.parts += 1
        receipt.samples += each.samples
        receipt.ids += each.ids
        receipt.digest = signed(receipt.digest + each.digest)
        self.samples += each.samples
        while (whole := self.open.get(self.steps)) is not None and self._whole(whole):
            self.receipts.append(self.open.pop(self.steps))
            self.steps += 1

    def _whole(self, receipt: Receipt) -> bool:
        return receipt.parts == self.slots

    def step_of(self, number: int) -> int:
        """The run's step to which a micro-batch belongs."""
        return self.first + number // self.slots

    def written(self, steps: int) -> None:
        """Main has written the receipts of these steps."""
        self.receipts = [receipt for receipt in self.receipts if receipt.step >= steps]

    # pushes

    def push(self, worker: int, own: int, number: int, call: int, update: bytes) -> int:
        """The number of a worker's push in the order of all, or AGAIN."""
        if worker in self.gone:
            return AGAIN
        last, answered = self.pushed.get(worker, (0, AGAIN))
        if own == last:
            return answered
        if own < last:
            raise ValueError(f"push {own} of worker {worker}, which has made {last}")
        count = AGAIN
        if (self.stretch, number) not in self.done and self.calls.get(number, 0) <= call:
            self.calls[number] = call + 1
            self.count = count = self.count + 1
            self.log.append(Counted(count, worker, own, update))
        self.pushed[worker] = own, count
        return count

    def counted(self, worker: int, own: int) -> bool:
        """Whether this, which was the worker's last push, has a number."""
        last, count = self.pushed.get(worker, (0, AGAIN))
        return own == last and count != AGAIN

    def heard(self, count: int) -> None:
        """All servers have applied so many."""
        if self.log and self.log[0].count <= count:
            self.log = [entry for entry in self.log if entry.count > count]

    # checkpoints

    def at_rest(self) -> Self:
        """The same for workers of another life: nothing in hand, nobody there."""
        unfinished = sorted({*self.back, *(number for mine in self.held.values() for number in mine)})
        rest = msgspec.structs.replace(
            self, back=unfinished, held={}, pushed={}, log=[], trainers=[], gone=[], stop=0, stopper=-1, keeper=-1
        )
        rest.receipts = []  # main has written them
        rest.clocks = Kept(staleness=self.clocks.staleness)
        return rest

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        return msgspec.msgpack.decode(data, type=cls)
