"""What strategies have in common whose workers run at their own pace: the register, stretches, pulls of what servers hold.

Such workers meet nobody within a stretch. They take what is to be done from the register (see `servers.register`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import torch

from paceline.errors import UsageError
from paceline.servers.holders import Directory, Holders
from paceline.servers.messages import Begin, Begun, Enter, Hold, Lost, Notes, Turn, Turned
from paceline.servers.register import Delivered, Register
from paceline.servers.stock import Stock
from paceline.state.replica import Replica
from paceline.strategies.base import Scaled, Seat
from paceline.strategies.buffers import Buffers
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers, Watch

_TELL_EVERY_S = 0.2


class Registered(ABC):
    _kind: type[Register] = Register

    def __init__(self, text: str) -> None:
        """As it is written for --strategy."""
        self._text = text
        self._gone: list[int] = []
        """Workers of whom nothing more is counted."""
        self._count = self._stretch = 0
        """Pushes, or rounds, that this worker has seen the result of; and stretches."""
        self._register_at_rest = b""
        self._told_s = self._spent_s = 0.0
        self.waits: dict[int, float] = {}

    def reach(self, servers: Directory, watch: Watch, seat: Seat) -> None:
        self._seat, self._holders = seat, Holders(servers)

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        if scaled is not None:
            raise UsageError(
                f"--precision fp16 with --strategy {self._text}: a gradient that overflows must be dropped by all workers "
                "together, and these do nothing together; use --precision bf16"
            )
        self._replica, self._mean = replica, mean
        self._buffers = Buffers(replica.buffers, replica.buffer_homes)
        self._layout = Layout.of([*replica.params, *replica.buffers], len(replica.params))
        self._stock = self._stocked()
        self._out = self._layout.allocate(lent=True)
        self._out_of = self._layout.views(self._out)
        """What goes to the servers next."""

    @abstractmethod
    def _stocked(self) -> Stock:
        """What lies at the servers."""

    def meet(self, peers: Peers) -> None:
        return

    # what the servers hold

    def lay(self) -> None:
        self._stock.lay(self._count, self._register_at_rest or self._kind(self._seat.slots, count=self._count).encode())

    def begin(self) -> None:
        self.pull(self._count)
        self._stock.empty_optimizers()

    def capture(self) -> dict[str, Any]:
        return {"count": self._count, "stretch": self._stretch, "register": self._register_at_rest}

    def restore(self, state: dict[str, Any]) -> None:
        self._count, self._stretch, self._register_at_rest = state["count"], state["stretch"], state["register"]

    @contextmanager
    def whole(self) -> Iterator[Register]:
        """Nothing is counted meanwhile: all fragments are of one moment, and so is the register."""
        reply = self._ask(Hold(self._seat.worker, yes=True))
        try:
            self.pull(reply.message.count)
            register = self._kind.decode(reply.body)
            self._register_at_rest = register.at_rest().encode()
            with self._filled():
                yield register
        finally:
            self._register_at_rest = b""
            self._ask(Hold(self._seat.worker, yes=False))

    def _filled(self) -> AbstractContextManager[None]:
        """Inside, all that servers hold is in the replica, or in what `capture` gives."""
        return self._stock.optimizers_filled()

    # a stretch

    def begin_stretch(
        self, total: int, epoch: int, loader: int, notes: Callable[[], bytearray], last: int = 0
    ) -> Begun:
        """With so many micro-batches, and with the run's step `last` at the latest, if there is one."""
        begun: Begun = self._ask(self._beginning(total, epoch, loader, last)).message
        if not begun.noted:
            self._ask(Notes(self._stretch, [self._place]), memoryview(notes()))
        return begun

    def _beginning(self, total: int, epoch: int, loader: int, last: int) -> Begin:
        return Begin(self._seat.worker, self._stretch, total, epoch, loader, last=last)

    def enter(self) -> memoryview:
        """In the middle of a stretch: what a newcomer needs to know."""
        return memoryview(self._ask(Enter(self._seat.worker)).body)

    def turn(
        self,
        want: int,
        delivered: Sequence[Delivered],
        stop: int = 0,
        written: int = -1,
        leaves: bool = False,
        scheduled: int = 0,
    ) -> Turned:
        """What this worker has in hand next. It has delivered these, and wishes to stop, if so."""
        self._replica.refuse_thawed(self._text)
        if news := [worker for worker in self._seat.lost() if worker not in self._gone]:
            self._ask(
                Lost(news)
            )  # now: where nobody waits, what they had in hand would be left, and its step open, to the end
        turned: Turned = self._ask(
            Turn(self._seat.worker, self._stretch, want, list(delivered), stop, written, leaves, scheduled)
        ).message
        self._gone = turned.gone
        for slowest, seconds in turned.waited.items():
            self.waits[slowest] = self.waits.get(slowest, 0.0) + seconds
        return turned

    def trainers(self) -> list[int]:
        """Who has trained in the stretch that is over, and is not gone."""
        return self.turn(0, []).trainers

    def parted(self, workers: list[int]) -> None:
        """These have left at its end, alive and as agreed. Nothing more comes of them, as of the dead."""
        self._ask(Lost(workers))

    def end_stretch(self, turned: Turned) -> None:
        """Everybody's weights are the same now."""
        self.pull(turned.count)

    def next_stretch(self) -> None:
        """All that belongs to the last one is done: what is kept before would find it over, and go on behind it."""
        self._stretch += 1

    def spent_s(self) -> float:
        """Seconds spent on pushes and pulls since this was asked last."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    # a pull

    def pull(self, count: int) -> None:
        """Go on with the weights after so many pushes, or more."""
        everything = range(len(self._stock.fragments))
        check = self._while_pulling()
        self._holders.through(lambda: self._holders.wait(self._stock.pull(everything, count), check))
        self._stock.take_pulled(())
        self._count = count
        self._to_model()

    def _to_model(self) -> None:
        tensors = [*(param.data for param in self._replica.params), *self._replica.buffers]
        with torch.no_grad():
            torch._foreach_copy_(tensors, self._stock.value_of)
        self._buffers.begin()

    def _while_pulling(self) -> Callable[[float], None]:
        return self._check

    # the register

    @property
    def _place(self) -> int:
        """It lies behind the fragments."""
        return len(self._stock.fragments)

    def _ask(self, message: msgspec.Struct, *body: memoryview) -> Any:
        self._told_s = -_TELL_EVERY_S

        def attempt() -> Any:
            return self._holders.wait([self._holders.back([self._place], message, *body)], self._check)[0]

        return self._holders.through(attempt)

    def _check(self, seconds: float) -> None:
        """While waiting: say who is dead."""
        self._seat.check()
        lost = self._seat.lost()
        if lost and seconds - self._told_s > _TELL_EVERY_S:
            self._told_s = seconds
            self._holders.out([self._place], Lost(lost))

    def wire_bytes(self) -> int:
        return self._holders.sent

    def close(self) -> None:
        self._holders.close()
