"""Samplers that deal some worker other samples are found, whenever it comes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import MismatchError
from paceline.loop.orders import Orders


def orders(*others: int) -> tuple[Orders, list[int]]:
    """Of worker 4, and what it has said when all met; the others are 5, 6, … and say these digests."""
    said: list[int] = []

    def gather(key: int, payload: Callable[[], bytes]) -> list[bytes]:
        said.append(int.from_bytes(payload(), "little"))
        return [payload(), *(digest.to_bytes(8, "little") for digest in others)]

    members = tuple(range(4, 5 + len(others)))
    session: Any = SimpleNamespace(view=SimpleNamespace(members=members))
    terms: Any = SimpleNamespace(gather=gather)
    return Orders(session, terms), said


def feed(digest: int) -> Any:
    return SimpleNamespace(order_digest=lambda epoch: digest)


def test_all_meet_once_an_epoch_and_loader() -> None:
    checked, said = orders(11, 11)
    for loader, epoch in [(0, 0), (0, 0), (1, 0), (0, 1), (0, 1)]:
        checked.check(feed(11), loader, epoch)
    assert said == [11, 11, 11]


def test_nobody_meets_where_the_run_deals() -> None:
    checked, said = orders(1)
    checked.check(feed(0), 0, 0)
    assert not said


def test_who_differs_is_named() -> None:
    checked, _ = orders(11, 12)
    with pytest.raises(MismatchError, match="gives worker 6 other samples"):
        checked.check(feed(11), 0, 3)


def test_a_newcomer_is_held_to_what_it_was_told_and_meets_nobody() -> None:
    member, _ = orders(11)
    member.check(feed(11), 0, 3)
    for digest in (11, 12):
        newcomer, said = orders(11)
        newcomer.restore(member.capture())
        if digest == 11:
            newcomer.check(feed(digest), 0, 3)
        else:
            with pytest.raises(MismatchError, match="the run has begun the epoch"):
                newcomer.check(feed(digest), 0, 3)
        assert not said
        newcomer.check(feed(11), 0, 4)
        assert said == [11], "the next epoch it begins with the others"


def test_one_who_follows_is_held_to_what_the_others_say() -> None:
    checked, _ = orders()
    checked._terms.gather = lambda key, payload: [(11).to_bytes(8, "little")] * 2  # type: ignore[method-assign]
    checked.check(feed(11), 0, 0)
    with pytest.raises(MismatchError, match="the run has begun the epoch"):
        checked.check(feed(12), 0, 1)
