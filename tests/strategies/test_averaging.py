"""What replicas exchange: the same comes of it however often they have to meet for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.state.replica import Replica
from paceline.strategies.averaging import Averaging, Circle, Gift
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.kept import Kept
from paceline.tensors.snapshot import Snapshot
from tests.strategies.one_worker import CPU
from tests.tensors.arithmetic import same
from tests.tensors.together import Member, Table, together

_MODEL = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))
_WHOLE = Circle([0, 1, 2], [0, 1, 2], 3, 0)
CODECS = ["", "+int8", "+topk:0.05", "+powersgd:1", "+randomk:0.2", "+onebit"]


def replica(peers: Member, codec: str) -> Averaging:
    mine = Replica(CPU)
    mine.add_model(copy.deepcopy(_MODEL))
    strategy = Averaging(f"streaming:4,2,overlap=1{codec}")
    strategy.attach(mine, peers, True, None)
    return strategy


def train(strategy: Averaging, rank: int, step: int) -> None:
    random = torch.Generator().manual_seed(100 * step + rank)
    with torch.no_grad():
        for tensor in (*strategy._replica.params, *(b for b in strategy._replica.buffers if b.is_floating_point())):
            tensor.add_(torch.randn(tensor.shape, generator=random), alpha=0.1)
    strategy.trained(4 + rank)


def state(strategy: Averaging) -> list[torch.Tensor]:
    """All that later exchanges depend on."""
    kept = Snapshot(strategy.capture()["kept"]).to_bytes()
    return [*strategy._theta, *strategy._replica.params, torch.frombuffer(bytearray(kept), dtype=torch.uint8)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_result_that_did_not_count_leaves_no_trace(codec: str) -> None:
    """Each time it is had in a group beside first: by all, or ended in the middle of several fragments; then again."""

    def trained(spare: list[Member], peers: Member, rehearsed: bool) -> list[torch.Tensor]:
        strategy, rank = replica(peers, codec), peers.rank
        for step in range(6):
            train(strategy, rank, step)
            gift = strategy.give(step % 2 if step < 5 else None)
            if rehearsed:
                strategy.exchange(gift, rank, _WHOLE, spare[rank])
                assert gift.met == [0, 1, 2]
                if gift.everything:
                    _end_behind_the_first(strategy, gift)
            strategy.exchange(gift, rank, _WHOLE)
            strategy.take(gift)
        return state(strategy)

    def work(rehearsed: bool) -> list[list[torch.Tensor]]:
        table = Table(3)
        spare = [Member(table, rank) for rank in range(3)]
        return together(3, lambda peers: trained(spare, peers, rehearsed))

    for once, twice in zip(work(False), work(True), strict=True):
        assert all(same(a, b) for a, b in zip(once, twice, strict=True))


def test_what_a_codec_keeps_is_as_before_when_a_commit_is_undone() -> None:
    kept = Kept(parse("int8"), [torch.Size([5])], None)
    kept.open(0, 3)
    seen = []
    for step in range(3):
        before = Snapshot(kept.own()).to_bytes()
        for _ in range(2):
            old = kept.old(1).clone()
            kept.new(1).fill_(float(step))
            kept.commit([1])
            assert same(kept.old(1), torch.full((5,), float(step)))
            kept.undo()
            assert same(kept.old(1), old) and Snapshot(kept.own()).to_bytes() == before
        kept.commit([1])
        seen.append(float(kept.old(1)[0]))
    assert seen == [0.0, 1.0, 2.0]


def _end_behind_the_first(strategy: Averaging, gift: Gift) -> None:
    """As if the term had ended when only the first fragment was met for."""
    reducer: Any = strategy._fragments[1].reducer
    gift.means.pop()
    if hasattr(reducer, "kept"):
        reducer.kept.undo()


def test_who_is_behind_keeps_what_its_own_message_left_out_once() -> None:
    """It has had the exchange beside its training, which did not count for all; the others had it without it."""

    def work(peers: Member) -> list[torch.Tensor]:
        strategy, rank = replica(peers, "+int8"), peers.rank
        train(strategy, rank, 0)
        gift = strategy.give(1)
        strategy.exchange(gift, rank, _WHOLE)
        if rank:
            strategy.take(gift)
            told = Snapshot(strategy.capture()).to_bytes()
            peers.gather(1, told)
        else:
            told = peers.gather(1, b"")[1]
            strategy.catch_up(gift, rank, 3, Snapshot.read(memoryview(bytearray(told))).tree)
        train(strategy, rank, 1)
        gift = strategy.give(1)
        strategy.exchange(gift, rank, _WHOLE)
        return gift.means[0].views

    def never_behind(peers: Member) -> list[torch.Tensor]:
        strategy, rank = replica(peers, "+int8"), peers.rank
        for step in range(2):
            train(strategy, rank, step)
            gift = strategy.give(1)
            strategy.exchange(gift, rank, _WHOLE)
            means = gift.means[0].views
            if not step:
                strategy.take(gift)
        return means

    for got, want in zip(together(3, work), together(3, never_behind), strict=True):
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
