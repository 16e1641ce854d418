"""What a replica brings to an exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.apart.exchanges import Exchanges, Word, _refuse_other_places
from paceline.errors import MismatchError


def word(slot: int, step: int) -> Word:
    return Word(2, slot, 0, 1, 0.0, False, [0, 1], 0, step, False, [])


def test_replicas_at_the_same_exchange_in_other_steps_are_told_apart() -> None:
    _refuse_other_places([word(0, 8), word(1, 8)])
    with pytest.raises(MismatchError, match="replica 0 at step 8, replica 1 at step 21, all to exchange 3"):
        _refuse_other_places([word(0, 8), word(1, 21)])


def test_one_that_arrives_behind_the_others_brings_what_it_has_taken_over() -> None:
    """Not the weights of rounds ago, which it had given before it came to where they are."""
    brought: list[Any] = []

    def assemble(slot: int, rounds: int, least: int) -> bool:
        raise StopIteration

    exchanges: Any = Exchanges.__new__(Exchanges)
    exchanges._run = SimpleNamespace(terms=SimpleNamespace(catching_up=True, come_in=lambda: None))
    exchanges._session = SimpleNamespace(joining=False)
    exchanges._behind = "what the others have"
    exchanges._arrives = lambda common: common == "what the others have"
    exchanges._strategy = SimpleNamespace(given_by_another=lambda gift: brought.append(gift) or "of now", rounds=3)
    exchanges.attendance = SimpleNamespace(assemble=assemble)
    exchanges.slot = 1
    with pytest.raises(StopIteration):
        exchanges._exchange("of rounds ago", [], 1)
    assert brought == ["of rounds ago"]
