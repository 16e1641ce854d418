"""What a group's meetings leave behind, and what a worker gets whose meeting others have completed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.tensors.layout import Layout
from paceline.tensors.peers import Alone, TermEnded
from paceline.tensors.remembering import Ended, Met, OutrunError, Past, Remembering
from paceline.tensors.tree import Plan
from paceline.wires.view import View
from tests.tensors.together import CPU, Member, together

ROWS = np.arange(6, dtype=np.int64).reshape(2, 3)


class Breaking(Alone):
    """A group that ends at one of its calls."""

    ends_together = False

    def __init__(self, at: str) -> None:
        super().__init__(CPU)
        self._at = at

    def _may_end(self, call: str) -> None:
        if call == self._at:
            raise TermEnded(call)

    def post(self, bucket: int) -> None:
        self._may_end("post")

    def exchange(self, key: int, lanes: Any) -> Any:
        self._may_end("exchange")
        return super().exchange(key, lanes)

    def repost(self, buckets: Any) -> None:
        self._may_end("repost")

    def total(self, call: int, divisor: float) -> list[torch.Tensor]:
        self._may_end("total")
        return super().total(call, divisor)

    def gather(self, key: int, payload: bytes) -> list[bytes]:
        self._may_end("gather")
        return super().gather(key, payload)


def point(peers: Remembering) -> tuple[Any, list[torch.Tensor]]:
    peers.open(Plan.of(1, 1), Layout.of([torch.empty(3)]), 3)
    peers.parts()[0][0].fill_(2.0)
    peers.post(0)
    rows = peers.exchange(1, np.zeros(3, dtype=np.int64))
    peers.repost([0])
    return rows, peers.total(0, 1.0)


def remembering(at: str, shipped: bool) -> tuple[Remembering, Past]:
    past = Past()

    def ended() -> bool:
        if shipped:
            past.reduced(Met(rows=ROWS, flats=[torch.full((16,), 5.0)]))
        return shipped

    return Remembering(Breaking(at), View(4, (0,)), past, ended), past


def test_an_outcome_is_kept_as_it_was() -> None:
    peers, past = remembering("never", shipped=False)
    rows, flats = point(peers)
    flats[0].zero_()
    assert past.last.rows is rows and set(past.last.flats[0].tolist()[:3]) == {2.0}
    assert (past.last.key, past.last.view, past.last.plan) == (1, View(4, (0,)), Plan.of(1, 1))
    assert (past.completed, past.opened) == (1, 0)
    assert peers.gather(2, b"said") == past.last.payloads == [b"said"] and past.completed == 2


@pytest.mark.parametrize("at", ["post", "exchange", "repost", "total"])
def test_a_point_that_others_have_met_returns_what_came_of_it(at: str) -> None:
    peers, past = remembering(at, shipped=True)
    rows, flats = point(peers)
    assert rows.tolist() == (ROWS.tolist() if at in ("post", "exchange") else [[0, 0, 0]])
    assert flats[0].tolist() == [5.0] * 16
    flats[0].zero_()
    assert past.last.flats[0].tolist() == [5.0] * 16, "it may be asked for again"
    with pytest.raises(TermEnded):
        peers.gather(1, b"")
    with pytest.raises(TermEnded):
        peers.open(Plan.of(1, 1), Layout.of([torch.empty(3)]), 3)


@pytest.mark.parametrize("at", ["post", "exchange", "repost", "total"])
def test_a_point_that_nobody_has_met_ends_with_its_term(at: str) -> None:
    """Where all meet: a bucket leaves in the middle of a backward, whose caller could not go on."""
    peers, past = remembering(at, shipped=False)
    with pytest.raises(TermEnded, match=at):
        point(peers)
    assert (past.completed, past.opened) == (0, 4), "it was opened in this term, whoever carries it on"


def test_a_point_that_is_carried_on_keeps_its_first_term() -> None:
    past = Past()
    ended = Ended(0, 2, CPU, 3, past)
    ended.open(Plan.of(4, 2), Layout.of([torch.empty(3)]), 3)
    assert len(ended.parts()) == 1
    for meet in (lambda: ended.exchange(1, ROWS[0]), lambda: ended.total(0, 1.0), lambda: ended.gather(1, b"")):
        with pytest.raises(TermEnded):
            meet()
    Remembering(Breaking("never"), View(5, (0,)), past, lambda: False).open(
        Plan.of(1, 1), Layout.of([torch.empty(3)]), 3
    )
    assert past.opened == 3


def at(completed: int, opened: int = 0) -> Past:
    past = Past()
    past.completed, past.opened = completed, opened
    return past


def synced(pasts: list[Past], term: int = 1) -> list[int]:
    return together(len(pasts), lambda member: pasts[member.rank].sync(member, term))


def test_who_is_behind_gets_the_rows_and_the_total() -> None:
    pasts = [at(6, opened=1), at(6), at(6, opened=1)]
    flats = [torch.full((4,), 0.1), torch.full((2,), 0.1, dtype=torch.float64)]
    pasts[1].reduced(Met(3, View(2, (0, 1, 2)), Plan.of(4, 3), ROWS, flats))
    assert synced(pasts) == [0, 0, 0], "what was opened is met now"
    for past in pasts:
        assert (past.last.key, past.last.view, past.last.plan) == (3, View(2, (0, 1, 2)), Plan.of(4, 3))
        assert past.last.rows.tolist() == ROWS.tolist() and (past.completed, past.opened) == (7, 0)
        assert [flat.tolist() for flat in past.last.flats] == [torch.full((4,), 0.1).tolist(), [0.1, 0.1]]


def test_who_is_behind_gets_what_was_said() -> None:
    pasts = [at(0), at(1)]
    pasts[0].reduced(Met(rows=ROWS, flats=[torch.ones(2)]))
    pasts[0].complete(Met(payloads=[b"a", b""]))
    synced(pasts)
    assert pasts[1].last.payloads == [b"a", b""] and pasts[1].last.flats == [], "of an older point nothing is sent"


def test_every_meeting_is_told_once_wherever_it_was_completed() -> None:
    """To newcomers that follow: also one that this worker was shipped."""
    told: list[list[bytes]] = []
    pasts = [at(1), at(2)]
    pasts[1].last = Met(payloads=[b"missed"])
    pasts[0].after = lambda met: told.append(met.payloads)
    synced(pasts)
    Remembering(Breaking("never"), View(2, (0,)), pasts[0], lambda: False).gather(1, b"met")
    assert told == [[b"missed"], [b"met"]]


def test_the_term_in_which_the_next_point_was_opened_is_known_to_all() -> None:
    assert synced([at(3), at(3, opened=2), at(2, opened=1)]) == [2, 2, 2]


def test_who_is_far_behind_learns_in_which_term_the_others_are() -> None:
    def sync(member: Member) -> int:
        pasts = [at(3), at(7), at(6)]
        try:
            return pasts[member.rank].sync(member, term=member.rank + 4)
        except OutrunError as outrun:
            return -outrun.term

    assert together(3, sync) == [-5, 0, 0]


def test_workers_that_opened_one_point_in_two_terms_cannot_go_on() -> None:
    with pytest.raises(AssertionError, match="different terms"):
        synced([at(3, opened=1), at(3, opened=2)])
