"""Calls to a server: in order, bounded, and told when the connection ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from paceline.servers.calling import Line, Lines, RefusedError, Reply
from paceline.servers.serving import Caller, Refusal
from paceline.tensors.channel import LARGEST_HEAD, Channel
from tests.servers.attending import attended
from tests.tensors.carriers import CARRIERS, PATIENCE_S


class Count(msgspec.Struct, tag=True, frozen=True):
    number: int


class Said(msgspec.Struct, tag=True, frozen=True):
    number: int


@pytest.fixture(params=list(CARRIERS))
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Line, Channel]]:
    """A line, and the server's end of its channel."""
    ours, theirs = CARRIERS[request.param]()
    line = Line(ours, Said, under_way=1 << 20)
    yield line, theirs
    line.close()
    theirs.close()


def answer(channel: Channel, message: msgspec.Struct, *body: bytes) -> None:
    channel.send(msgspec.msgpack.encode(message), *body)


def test_answers_belong_to_their_calls(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    futures = [line.call(Count(number)) for number in range(20)]
    for _ in range(20):
        head, _ = server.receive()
        number = msgspec.msgpack.decode(head, type=Count).number
        answer(server, Said(number) if number % 3 else Refusal(f"not {number}"), b"x" * number)
    for number, future in enumerate(futures):
        if number % 3:
            reply = future.result(PATIENCE_S)
            assert reply.message == Said(number) and len(reply.body) == number
        else:
            with pytest.raises(RefusedError, match=f"^not {number}$"):
                future.result(PATIENCE_S)


def test_an_answer_goes_where_it_was_told_to_if_it_fits(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    memory = memoryview(bytearray(4))
    fits, longer = line.call(Count(1), into=memory), line.call(Count(2), into=memory)
    answer(server, Said(1), b"four")
    answer(server, Said(2), b"longer")
    assert fits.result(PATIENCE_S).body == memory == b"four"
    assert longer.result(PATIENCE_S).body == b"longer" and memory == b"four"


def test_what_comes_of_a_call_is_what_is_made_of_its_answer(ends: tuple[Line, Channel]) -> None:
    """Also an error: it is the caller's, and the line goes on."""

    def turn(reply: Reply) -> int:
        return 100 // int(reply.message.number)

    line, server = ends
    futures = [line.turned(turn, Count(number)) for number in range(3)]
    for message in (Said(4), Said(0), Refusal("no")):
        answer(server, message)
    assert futures[0].result(PATIENCE_S) == 25
    with pytest.raises(ZeroDivisionError):
        futures[1].result(PATIENCE_S)
    with pytest.raises(RefusedError, match="no"):
        futures[2].result(PATIENCE_S)
    last = line.turned(turn, Count(3))
    answer(server, Said(5))
    assert last.result(PATIENCE_S) == 20


def test_what_is_under_way_is_bounded(ends: tuple[Line, Channel]) -> None:
    """The caller waits for an answer, not for a clock."""
    line, server = ends
    made: list[int] = []

    def call() -> None:
        for number in range(6):
            line.call(Count(number), bytes(400_000))
            made.append(number)

    caller = threading.Thread(target=call)
    caller.start()
    for number in range(6):
        server.receive()
        assert len(made) <= number + 2  # two of them fit, and a third is being made
        answer(server, Said(number))
    caller.join(PATIENCE_S)
    assert len(made) == 6


def test_a_call_that_is_over_the_bound_by_itself_is_made(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    future: list[Any] = []
    caller = threading.Thread(target=lambda: future.append(line.call(Count(1), bytes(5 << 20))))
    caller.start()
    assert server.receive().body.nbytes == 5 << 20
    answer(server, Said(1))
    caller.join(PATIENCE_S)
    assert future[0].result(PATIENCE_S).message == Said(1)


def test_the_end_of_the_connection_is_told_to_everybody_who_waits(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    futures = [line.call(Count(number)) for number in range(3)]
    answer(server, Said(0))
    assert futures[0].result(PATIENCE_S).message == Said(0)
    server.close()
    for future in futures[1:]:
        with pytest.raises(ConnectionError, match="the connection to the server has ended: the other side"):
            future.result(PATIENCE_S)
    with pytest.raises(ConnectionError, match="has ended"):
        line.call(Count(4)).result(PATIENCE_S)


def test_who_waits_for_room_is_told_too(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    futures: list[Any] = []

    def call() -> None:
        for number in range(5):
            futures.append(line.call(Count(number), bytes(400_000)))

    caller = threading.Thread(target=call)
    caller.start()
    server.receive()
    server.close()
    caller.join(PATIENCE_S)
    assert len(futures) == 5 and all(isinstance(each.exception(PATIENCE_S), ConnectionError) for each in futures)


def test_closing_tells_those_who_wait(ends: tuple[Line, Channel]) -> None:
    line, _ = ends
    future = line.call(Count(1))
    line.close()
    with pytest.raises(ConnectionError, match="closed here"):
        future.result(PATIENCE_S)


@pytest.mark.parametrize("words", [b"\xc1", msgspec.msgpack.encode(Count(1)), b"\x91" * 3000])
def test_an_answer_that_is_none_ends_the_connection(ends: tuple[Line, Channel], words: bytes) -> None:
    line, server = ends
    future = line.call(Count(1))
    server.send(words)
    with pytest.raises(ConnectionError, match="has ended"):
        future.result(PATIENCE_S)


def test_an_answer_to_no_call_ends_the_connection(ends: tuple[Line, Channel]) -> None:
    line, server = ends
    answer(server, Said(1))
    line._reader.join(PATIENCE_S)
    with pytest.raises(ConnectionError, match="an answer to no call came"):
        line.call(Count(1)).result(PATIENCE_S)


def test_a_call_that_is_too_long_is_told_before_it_is_said(ends: tuple[Line, Channel]) -> None:
    class Long(msgspec.Struct, tag=True):
        words: str

    line, server = ends
    with pytest.raises(ValueError, match="a head has 1 to"):
        line.call(Long("x" * LARGEST_HEAD))
    future = line.call(Count(1))
    answer(server, Said(1))
    assert future.result(PATIENCE_S).message == Said(1)


def test_both_pipes_full_hold_nobody_up() -> None:
    """The server answers each call with more than any buffer takes, and the caller goes on calling."""

    def handle(caller: Caller, message: Count, body: memoryview) -> tuple[msgspec.Struct, list[bytes]]:
        return Said(message.number), [bytes(body)]

    with attended(Count, handle) as channel:
        line = Line(channel, Said)
        futures = [line.call(Count(number), bytes(4 << 20)) for number in range(24)]
        assert [future.result(PATIENCE_S).message.number for future in futures] == list(range(24))
        line.close()


def test_calls_of_a_lane_keep_their_order() -> None:
    heard: dict[int, list[int]] = {0: [], 1: []}

    def listening(lane: int) -> Any:
        def handle(caller: Caller, message: Count, body: memoryview) -> tuple[msgspec.Struct, list[bytes]]:
            heard[lane].append(message.number)
            return Said(message.number), []

        return handle

    with attended(Count, listening(0)) as first, attended(Count, listening(1)) as second:
        lines = Lines([first, second], Said)
        futures = [lines[number].call(Count(number)) for number in range(10)]
        assert [future.result(PATIENCE_S).message.number for future in futures] == list(range(10))
        lines.close()
    assert heard == {0: [0, 2, 4, 6, 8], 1: [1, 3, 5, 7, 9]}
