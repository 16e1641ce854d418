"""Waiting on words in shared memory."""

from __future__ import annotations

import os

import pytest

from paceline.tensors.peers import TermEnded
from paceline.tensors.segment import Segment, Words


def words_of_two() -> Segment:
    size = Words.nbytes(2, 3)
    fd = os.memfd_create("words")
    os.ftruncate(fd, size)
    return Segment(fd, size)


@pytest.mark.parametrize("came", [True, False])
def test_one_who_came_and_died_between_two_looks_has_come(came: bool) -> None:
    """Others have seen it come: whoever ended the term here would wait for them in the next one, for ever."""
    segment = words_of_two()
    other = Words(segment, 1, 2, 3, lambda seconds, laggard: None)

    def buried(seconds: float, laggard: int) -> None:
        if came:
            other.say(0, 5)
        raise TermEnded("worker 1 is gone")

    mine = Words(segment, 0, 2, 3, buried)
    mine.say(0, 5)
    if came:
        mine.wait(0, 5)
    else:
        with pytest.raises(TermEnded):
            mine.wait(0, 5)
