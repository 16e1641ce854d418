"""Whether an exception has ended a loop, or came up behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from paceline.loop.unwinding import Running, came_through, running_now


class Loop:
    """Like a run's: it notes how it was left."""

    closed: Running

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            self.end()

    def end(self) -> None:
        self.closed = running_now() if isinstance(sys.exception(), GeneratorExit) else []


def bar(items: Loop) -> Iterator[int]:
    """A progress bar stands between the script and the loop."""
    for number, item in enumerate(items):
        yield number * item


def fail(*_: object) -> None:
    raise ValueError("boom")


def ended_by(loop: Loop, script: Callable[[Loop], None]) -> bool:
    with pytest.raises(ValueError, match="boom") as caught:
        script(loop)
    return came_through(caught.value.__traceback__, loop.closed)


def in_the_body(loop: Loop) -> None:
    for _ in loop:
        fail()


def under_a_bar(loop: Loop) -> None:
    for _ in bar(loop):
        fail()


def in_a_try(loop: Loop) -> None:
    try:
        for _ in loop:
            try:
                fail()
            finally:
                _ = 1
    finally:
        _ = 2


def raised_again(loop: Loop) -> None:
    for _ in loop:
        try:
            fail()
        except ValueError:
            sys.stdout.flush()
            raise


def in_a_function_of_its_own(loop: Loop) -> None:
    def train() -> None:
        in_the_body(loop)

    train()


@pytest.mark.parametrize("script", [in_the_body, under_a_bar, in_a_try, raised_again, in_a_function_of_its_own])
def test_raised_in_the_loop(script: Callable[[Loop], None]) -> None:
    assert ended_by(Loop(), script)


def at_the_end(loop: Loop) -> None:
    for _ in loop:
        continue
    fail()


def after_a_break(loop: Loop) -> None:
    for _ in loop:
        break
    fail()


def after_a_break_under_a_bar(loop: Loop) -> None:
    for _ in bar(loop):
        break
    fail()


def after_a_return(loop: Loop) -> None:
    def train() -> int:
        for item in loop:
            return item
        return -1

    fail(train())


def after_one_that_was_caught(loop: Loop) -> None:
    try:
        in_the_body(loop)
    except ValueError:
        fail()


BEHIND = [at_the_end, after_a_break, after_a_break_under_a_bar, after_a_return]


@pytest.mark.parametrize("script", BEHIND)
def test_raised_behind_the_loop(script: Callable[[Loop], None]) -> None:
    assert not ended_by(Loop(), script)


def test_a_loop_that_was_left_in_a_function_that_goes_on() -> None:
    """The function that called both is at the same instruction."""

    def script(loop: Loop) -> None:
        after_a_break(loop)

    assert not ended_by(Loop(), script)


def test_an_exception_that_was_caught_is_not_the_next_one() -> None:
    loop = Loop()
    assert not ended_by(loop, after_one_that_was_caught)
