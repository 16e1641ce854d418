"""When replicas meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.servers.outer import SGD, Nesterov
from paceline.strategies.rhythm import Rhythm, parse


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 9))
def test_each_fragment_is_given_once_in_so_many_steps_and_never_two_together(
    every: int, fragments: int, first: int
) -> None:
    fragments = min(every, fragments)
    rhythm = Rhythm(every, SGD(), first=first, fragments=fragments)
    given = [rhythm.gives(step) for step in range(first + 1, first + 3 * every + 1)]
    assert [fragment for fragment in given if fragment is not None] == list(range(fragments)) * 3
    for fragment in range(fragments):
        steps = [step for step, now in enumerate(given) if now == fragment]
        assert {later - step for step, later in zip(steps, steps[1:], strict=False)} == {every}


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 59))
def test_what_is_given_comes_in_before_the_next_is_given(every: int, fragments: int, overlap: int) -> None:
    fragments = min(every, fragments)
    rhythm = Rhythm(every, SGD(), fragments=fragments, overlap=min(overlap, every // fragments - 1))
    waiting = 0
    for step in range(1, 3 * every):
        if rhythm.overlap and rhythm.takes(step):
            waiting -= 1
        waiting += rhythm.gives(step) is not None
        if not rhythm.overlap and rhythm.takes(step):
            waiting -= 1
        assert waiting in (0, 1)


def test_what_is_written() -> None:
    assert parse("gossip") == parse("gossip:1") == Rhythm(1, SGD())
    assert parse("postlocal:500,20") == Rhythm(20, SGD(), first=500)
    assert parse("diloco") == parse("diloco:50") == Rhythm(50, Nesterov())
    assert parse("diloco:50,lr=1,momentum=0.5") == Rhythm(50, Nesterov(lr=1, momentum=0.5))
    assert parse("streaming:50,4") == Rhythm(50, Nesterov(), fragments=4, overlap=5, mix=0.5)
    assert parse("streaming:4,4") == Rhythm(4, Nesterov(), fragments=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local", "there is no default; write local:20"),
        ("local", "there is no default; write local:20"),
        ("streaming", "there is no default; write streaming:50,4"),
        ("local:", "write it like local:20"),
        ("gossip:0", "write it like gossip or gossip:4"),
        ("gossip:4,lr=1", "gossip takes the mean, and has no lr; write diloco:4,lr=1"),
        ("local:0", "write it like local:20"),
        ("local:20,lr=1", "local takes the mean, and has no lr; write diloco:20,lr=1"),
        ("diloco:50,lr=-1", "lr must be above 0"),
        ("diloco:50,outer=adam,momentum=0.9", "adam has no momentum"),
        ("diloco:50,outer=lion", "there is no outer optimizer 'lion'"),
        ("diloco:50,lr=x", "write it like diloco or diloco:50"),
        ("diloco:50,overlap=3", "nesterov has no overlap"),
        ("streaming:50", "write it like streaming:50,4"),
        ("streaming:50,60", "one a step at most"),
        ("streaming:50,5,overlap=10", "below 10"),
        ("streaming:50,5,mix=1", "from 0 to below 1"),
        ("postlocal:500", "write it like postlocal:500,20"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"--strategy {text}.*{words}"):
        parse(text)
