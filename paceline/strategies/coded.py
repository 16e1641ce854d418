"""Workers that meet in every step, with a codec: `allreduce+int8`, and at servers `ps+int8`.

Each share's gradient is sent as few bytes, and what these leave out is kept for the share's next message; see
`tensors.coded`. The result is the same at any worker count, and with servers or without, but not that of plain all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from paceline.errors import UsageError
from paceline.servers.coded import CodedPeers, ServedReducer, coding
from paceline.servers.coding import Coding, Excerpts
from paceline.servers.fragments import cut
from paceline.servers.peers import ServedPeers
from paceline.state.replica import Replica
from paceline.strategies import split_codec
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base import Point, Scaled
from paceline.strategies.ps import ParameterServers
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.kept import Allocate
from paceline.tensors.coded import CodedReducer
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import Plan


class CodedAllReduce(AllReduce):
    _reducer: CodedReducer
    _reducer_kind: type[CodedReducer] = CodedReducer

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._codec_text = split_codec(text)[1]
        self._codec = parse(self._codec_text)
        self._allocate: Allocate | None = None
        self._at = 0, 0
        """Step and number of the reduce point in hand."""
        self._lost = False
        """What was kept for somebody's shares is gone with it."""
        self._restored: list[list[Any]] = []
        """What was kept before this worker came, until its first point: the script may thaw a layer there."""

    def keep_in(self, allocate: Allocate | None, go_back: Callable[[str], NoReturn]) -> None:
        self._allocate, self._go_back = allocate, go_back

    def attach(self, replica: Replica, peers: Peers, mean: bool, scaled: Scaled | None) -> None:
        if scaled is not None:
            raise UsageError(
                f"precision fp16 scales gradients, by another factor at other times: what {self._codec.name} keeps of them cannot "
                "be added to later ones; pass --precision bf16"
            )
        super().attach(replica, peers, mean, scaled)

    def _new_reducer(self, tensors: Sequence[torch.Tensor], count: int) -> CodedReducer:
        reducer = self._reducer_kind(tensors, count, self._peers, self._codec, self._allocate)
        reducer.begin(*self._at)
        if hasattr(self, "_reducer"):
            reducer.go_on_from(self._reducer)
        if reducer.kept.fits(self._restored):
            reducer.kept.restore(self._restored)
        return reducer

    def open(self, point: Point, plan: Plan, flat: bool) -> None:
        self._need_all()
        self._at = point.step, point.call
        self._reducer.begin(*self._at)
        super().open(point, plan, flat)
        if not self._reducer.kept.fits(self._restored):
            raise UsageError(
                f"the run's state has what {self._codec.name} kept of other parameters than those that are trained here: go on "
                "with the model it was written with"
            )
        self._restored = []

    # newcomers and checkpoints

    @property
    def scattered(self) -> bool:
        return self._codec.feedback and self._allocate is None

    def collect(self, gather: Callable[[Callable[[], bytes]], list[bytes]]) -> None:
        if self._reducer.kept.whole:
            return
        self._need_all()
        said = gather(lambda: bytes(Snapshot(self._reducer.kept.own()).packed()))
        self._need_all()  # somebody may have been lost in that
        everyone = [Snapshot.read(memoryview(bytearray(raw))).tree for raw in said]
        self._reducer.kept.take_in(everyone, self._peers.rank == 0)

    def meet(self, peers: Peers) -> None:
        self._lost = self._lost or self._reducer.kept.needs_others
        super().meet(peers)

    def carry_on(self, point: Point, plan: Plan, kept: int) -> list[int]:
        self._need_all()
        return super().carry_on(point, plan, kept)

    def as_begun(self) -> AbstractContextManager[None]:
        self._lost = self._lost or self._reducer.kept.needs_others
        self._need_all()
        return super().as_begun()

    def _need_all(self) -> None:
        """Not before it is needed: a run that is at its end trains no more."""
        if self._lost:
            self._go_back(f"a worker is gone, and with it what {self._codec.name} had kept for its slots")

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), "kept": self._reducer.kept.capture()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._restored = state["kept"]
        if self._reducer.kept.fits(self._restored):
            self._reducer.kept.restore(self._restored)

    def report(self) -> dict[str, Any]:
        sent, plain = self._reducer.sent_bytes, self._reducer.plain_bytes
        return {**super().report(), "compression": round(sent / plain, 5) if plain else 1.0}


class CodedServers(CodedAllReduce, ParameterServers):
    """The same at servers, which decode what comes."""

    _reducer: ServedReducer
    _reducer_kind = ServedReducer

    @property
    def _laid_out(self) -> Layout:
        return self._reducer.whole

    def _coding(self) -> Coding:
        made = coding(self._codec_text, self._reducer.encoder)
        self._excerpts = Excerpts(made, cut(self._laid_out, len(self._replica.params)))
        return made

    def _group(self, *arguments: Any) -> ServedPeers:
        return CodedPeers(*arguments, excerpts=lambda: self._excerpts)
