"""Workers at their own pace, with a codec: `async+int8`, `ssp:3+topk:0.01`.

A push is sent as few bytes. What these leave out is kept for its worker's next push; what a dead worker has kept goes into
another one's (see `tensors.codecs.seats`). It is kept when the push is counted, and not before: of a push that does not count,
because another worker had pushed the same micro-batch, nothing is sent and nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from paceline.errors import UsageError
from paceline.servers.calling import Reply
from paceline.servers.coded import coding
from paceline.servers.coding import AT_ONCE, Coding, Excerpts
from paceline.servers.fragments import cut
from paceline.servers.messages import Had, Stage
from paceline.servers.register import Register
from paceline.strategies import split_codec
from paceline.strategies.free import FreeRunning
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.kept import Allocate
from paceline.tensors.codecs.seats import Seats
from paceline.tensors.encoding import Encoder, seed_of

_LOOK_S = 0.01


class CodedFree(FreeRunning):
    def __init__(self, text: str) -> None:
        plain, self._codec_text = split_codec(text)
        super().__init__(plain)
        self._text, self._codec = text, parse(self._codec_text)
        self._allocate: Allocate | None = None
        self._kept: list[torch.Tensor] = []
        """What all workers had kept: while a checkpoint is taken, and from when one is read until it is laid."""
        self._sent_bytes = self._plain_bytes = 0

    # what is kept

    scattered = False

    def keep_in(self, allocate: Allocate | None, go_back: Callable[[str], NoReturn]) -> None:
        self._allocate = allocate

    def collect(self, gather: Callable[[Callable[[], bytes]], list[bytes]]) -> None:
        return

    def _coding(self) -> Coding:
        replica = self._replica
        self._encoder = Encoder([*replica.params, *replica.buffers], len(replica.params), self._codec)
        self._seats = Seats(self._codec, self._encoder.shapes, self._seat.slots, self._allocate)
        made = coding(self._codec_text, self._encoder)
        self._excerpts = Excerpts(made, cut(self._layout, len(replica.params)))
        return made

    def lay(self) -> None:
        super().lay()
        if not self._seats.fits(self._kept):
            raise UsageError(
                f"the run's state has what {self._codec.name} kept of other parameters than those that are trained here: go on "
                "with the model it was written with"
            )
        self._seats.lay(self._kept)

    def begin(self) -> None:
        super().begin()
        self._kept = []
        while not self._seats.sit(self._had):  # for a moment others may have all that are free
            self._seat.check()
            time.sleep(_LOOK_S)

    def _had(self, worker: int, own: int) -> bool:
        """Whether a worker that is dead has had this push counted."""
        return bool(self._ask(Had(worker, own)).message.yes)

    @contextmanager
    def whole(self) -> Iterator[Register]:
        with super().whole() as register:
            self._kept = self._seats.capture(register.counted)
            yield register
            self._kept = []

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "kept": self._kept}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._kept = state["kept"]

    def report(self) -> dict[str, Any]:
        """Of main's own messages. On several machines, whose residuals are lost with them."""
        ratio = self._sent_bytes / self._plain_bytes if self._plain_bytes else 1.0
        lost = {"residuals_lost": self._gone} if self._codec.feedback and not self._seats.shared and self._gone else {}
        return {**super().report(), "compression": round(ratio, 5), **lost}

    # a push

    def _encode(self, params: set[int]) -> None:
        push = self._seat.worker, self._own
        grads = [self._out_of[index] if index in params else None for index in range(len(self._replica.params))]
        old = self._seats.old(self._had)
        self._message = self._encoder.encode(grads, 1.0, seed_of(*push), old, self._seats.new())
        self._seats.put(*push)
        self._plain_bytes += sum(4 * self._out_of[index].numel() for index in params.intersection(self._encoder.coded))

    def _decided(self, counted: bool) -> None:
        self._seats.decide(counted)

    def _staging(self, due: Sequence[int]) -> Iterator[Future[Reply]]:
        covered, push, before = set(self._excerpts.covered), (self._seat.worker, self._own), self._holders.sent
        for batch in self._holders.batches([k for k in due if k in covered], AT_ONCE):
            body = self._excerpts.written(self._message, batch, seed_of(*push))
            yield self._holders.out(batch, Stage(*push, batch, coded=batch), body)
        self._sent_bytes += self._holders.sent - before
        yield from super()._staging([k for k in due if k not in covered])

    def close(self) -> None:
        super().close()
        self._seats.close()
