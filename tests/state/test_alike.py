"""What of a state need not be sent, because another one has it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.state import alike
from paceline.state.alike import arrived, fill, lying, missing, pieces
from paceline.tensors.snapshot import Snapshot


def state(words: str, *values: float) -> memoryview:
    """A tensor of each value, of some pieces."""
    tensors = [torch.arange(700_000.0) + value / 8 for value in values]
    return memoryview(Snapshot({"words": words, "tensors": tensors, "empty": torch.empty(0)}).packed())


def sent_of(wanted: memoryview, known: dict[bytes, memoryview]) -> tuple[int, memoryview]:
    """How many bytes, and what is there then."""
    cut = pieces(wanted)
    numbers, room = missing(cut, known), memoryview(bytearray(len(wanted)))
    for number in numbers:
        room[cut[number].begin : cut[number].end] = wanted[cut[number].begin : cut[number].end]
    assert fill(room, cut, numbers, known)
    return sum(cut[number].end - cut[number].begin for number in numbers), room


def test_only_what_the_other_state_has_not_is_sent() -> None:
    mine, theirs = state("mine and some more words", 1.0, 2.0, 2.0, 3.0), state("theirs", 5.0, 2.0)
    size = 700_000 * 4
    sent, room = sent_of(mine, lying(theirs))
    assert 2 * size < sent < 2 * size + 10_000, "the first and the last, and the header"
    assert room == mine
    sent, room = sent_of(mine, {})
    assert 3 * size < sent < 3 * size + 10_000 and room == mine, "one of two that are the same"


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=5))
def test_whatever_is_known_the_same_state_comes_out(mine: list[int], theirs: list[int]) -> None:
    def small(numbers: list[int]) -> memoryview:
        return memoryview(Snapshot([torch.full((1 + k, 3), k // 2) for k in numbers]).packed())

    _, room = sent_of(small(mine), lying(small(theirs)))
    there, wanted = (Snapshot.read(memory).tree for memory in (room, small(mine)))
    assert all(torch.equal(one, other) for one, other in zip(there, wanted, strict=True))


def test_what_has_changed_since_it_was_looked_at_is_not_taken() -> None:
    mine, theirs = state("mine", 1.0), state("theirs", 1.0)
    cut, known = pieces(mine), lying(theirs)
    theirs[-1000:] = b"\1" * 1000
    assert not fill(memoryview(bytearray(len(mine))), cut, missing(cut, known), known)


def test_pieces_are_cut_where_tensors_begin() -> None:
    cut = pieces(state("words", 1.0))
    assert [piece.end - piece.begin for piece in cut[:-1]] == [alike._MOST, alike._MOST, 2_800_000 - 2 * alike._MOST]


def test_words_that_have_changed_places_are_not_the_same() -> None:
    """As a permutation at another step, or a count that has moved on: a plain sum would take them for each other."""
    one = memoryview(bytearray(Snapshot({"order": torch.arange(64)}).packed()))
    other = memoryview(bytearray(Snapshot({"order": torch.arange(64).flip(0)}).packed()))
    assert arrived(other, pieces(one)) == [1], "the header"
    assert missing(pieces(one), lying(other)) == [0]


def test_signs_that_have_changed_are_not_the_same() -> None:
    """In pairs: in a sum of words, each times a factor of its own, the two highest bits make up for each other."""
    one = torch.ones(256)
    other = one.clone()
    other[[1, 5]] *= -1
    one, other = (memoryview(bytearray(Snapshot({"signs": signs}).packed())) for signs in (one, other))
    assert missing(pieces(one), lying(other)) == [0]
