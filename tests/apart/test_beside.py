"""An exchange beside the training: what all come to when its result is due, and that it can be called off at any time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.apart.beside import Beside, State, Verdict, decide
from paceline.errors import PeerLostError, ResourceError
from paceline.tensors.peers import Peers
from paceline.wires.view import View

LACKING, NOTHING, UNDER_WAY, THERE = State
PATIENCE_S = 60.0


def came(beside: Beside) -> bool:
    """Whether the result is there, once it is over."""
    beside.wait(PATIENCE_S)
    return beside.state == THERE


@given(st.lists(st.booleans(), min_size=2, max_size=6), st.integers(0, 63))
def test_it_counts_for_all_or_is_had_again_and_nobody_waits_in_vain(began: list[bool], early: int) -> None:
    """Who has begun is through only if all have. `early`: who was so before the result was due."""
    completes = all(began)
    said = [
        (THERE if completes and early >> k & 1 else UNDER_WAY) if begun else NOTHING for k, begun in enumerate(began)
    ]
    match decide(said):
        case Verdict.TAKE:
            assert completes
        case Verdict.WAIT:
            assert completes and UNDER_WAY in said, "one that is under way would never end"
        case Verdict.AGAIN:
            assert not completes


@given(st.lists(st.sampled_from(State), min_size=1, max_size=6))
def test_the_order_of_who_says_it_does_not_matter(said: list[State]) -> None:
    assert decide(said) == decide(sorted(said)) == decide([int(state) for state in reversed(said)])


class Segments:
    """Shared memory by name, as an agent has it."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, size: int, ask: object = None) -> int:
        with self._lock:
            if name not in self._fds:
                self._fds[name] = os.memfd_create(name.replace("/", "-"), os.MFD_CLOEXEC)
                os.ftruncate(self._fds[name], size)
            return os.dup(self._fds[name])

    @property
    def groups(self) -> set[str]:
        return {name.rpartition("/")[0] for name in self._fds}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class Board:
    def __init__(self) -> None:
        self.abort = self.overtaken = 0
        self.dead: set[int] = set()

    def gone(self, worker: int) -> bool:
        return worker in self.dead


class Two:
    """Two workers of a machine, each with its exchanges beside the training."""

    def __init__(self) -> None:
        self.segments, self.board = Segments(), Board()
        self.sessions = [self._session(rank) for rank in range(2)]
        self.beside = [Beside(cast(Any, session)) for session in self.sessions]

    def _session(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            board=self.board,
            segment=self.segments,
            worker=rank,
            rank=rank,
            workers=2,
            launched=True,
            apart=False,
            view=View(1, (0, 1)),
            settings=SimpleNamespace(threads=1, transport="shm"),
            line_of_its_own=lambda: print,
            check_own_place=lambda: None,
            overtaken=False,
        )

    def start(self, rounds: int, *ranks: int) -> list[list[bytes]]:
        """What each has heard, once it has."""
        heard: list[list[bytes]] = []
        for rank in ranks:
            self.beside[rank].start(rounds, self._hold(rounds, rank, heard))
        return heard

    def _hold(self, rounds: int, rank: int, heard: list[list[bytes]]) -> Callable[[Peers], None]:
        def hold(peers: Peers) -> None:
            assert torch.get_num_threads() == 1
            heard.append(peers.gather(rounds, bytes([rank])))

        return hold

    def next_term(self) -> None:
        for session in self.sessions:
            session.view = View(session.view.term + 1, (0, 1))


@contextmanager
def two() -> Iterator[Two]:
    workers, threads = Two(), torch.get_num_threads()
    try:
        yield workers
    finally:
        for beside in workers.beside:
            beside.close()
        workers.segments.close()
        torch.set_num_threads(threads)  # some of what a thread has set is everybody's


def test_what_all_have_counts_and_the_group_is_met_in_again() -> None:
    with two() as workers:
        for rounds in (4, 5, 6):
            heard = workers.start(rounds, 0, 1)
            assert all(map(came, workers.beside))
            assert [beside.state for beside in workers.beside] == [THERE, THERE]
            assert heard == [[b"\0", b"\1"]] * 2
            for beside in workers.beside:
                beside.taken()
                assert beside.state == NOTHING
        assert workers.segments.groups == {"group-1/beside-4"}
        assert workers.beside[0].sent_bytes == 3


def test_who_waits_for_one_that_never_comes_is_called_off_and_all_meet_in_a_new_group() -> None:
    with two() as workers:
        workers.start(4, 0)
        assert workers.beside[0].state == UNDER_WAY
        workers.beside[0].end()
        assert not came(workers.beside[0]) and workers.beside[0].state == NOTHING
        workers.start(5, 0, 1)
        assert all(map(came, workers.beside))
        assert "group-1/beside-5" in workers.segments.groups


def test_a_result_that_does_not_count_is_dropped_with_its_group() -> None:
    with two() as workers:
        workers.start(4, 0, 1)
        assert all(map(came, workers.beside))
        for beside in workers.beside:
            beside.end()
        workers.start(5, 0, 1)
        assert all(map(came, workers.beside))
        assert workers.segments.groups == {"group-1/beside-4", "group-1/beside-5"}
        assert workers.beside[0].sent_bytes == 2, "what has been sent was sent"


@pytest.mark.parametrize("how", ["gone", "overtaken"])
def test_a_death_ends_it_with_nothing_and_the_next_term_has_a_group_of_its_own(how: str) -> None:
    with two() as workers:
        workers.start(4, 0)
        if how == "gone":
            workers.board.dead = {1}
        else:
            workers.board.overtaken = 2
        assert not came(workers.beside[0]) and workers.beside[0].state == NOTHING
        workers.beside[0].end()
        workers.board.dead = set()
        workers.next_term()
        workers.start(4, 0, 1)
        assert all(map(came, workers.beside))
        assert "group-2/beside-4" in workers.segments.groups


def test_an_error_comes_out_where_the_result_is_due() -> None:
    with two() as workers:
        workers.start(4, 0)
        workers.board.abort = 1
        workers.beside[0].wait(PATIENCE_S)
        with pytest.raises(PeerLostError, match="the run is stopping"):
            _ = workers.beside[0].state


def test_where_groups_cannot_be_met_in_side_by_side_nothing_is_begun() -> None:
    with two() as workers:
        for session in workers.sessions:
            session.settings.transport = "gloo"
        workers.start(4, 0, 1)
        assert [beside.state for beside in workers.beside] == [NOTHING, NOTHING]


def test_nothing_is_begun_in_a_view_that_is_over() -> None:
    """Its members, and where they are, are known no more: the result is exchanged where it is due."""
    workers = Two()
    for session in workers.sessions:
        session.overtaken = True
    heard = workers.start(4, 0, 1)
    assert [beside.state for beside in workers.beside] == [State.NOTHING] * 2
    assert not heard and not workers.segments.groups


def test_too_little_memory_on_one_side_holds_nobody_up_and_is_not_tried_again_in_this_term() -> None:
    """Who lacks it says so, again and again if need be, and the other one stops waiting for it in the group beside."""
    with two() as workers:
        enough = workers.sessions[1].segment

        def refuse(name: str, size: int, ask: Any = None) -> int:
            raise ResourceError("no memory is left")

        workers.sessions[1].segment = refuse
        workers.start(4, 0, 1)
        workers.beside[1].wait(PATIENCE_S)
        said = [beside.state for beside in workers.beside]
        assert said == [UNDER_WAY, LACKING] and decide(said) == Verdict.AGAIN
        for beside in workers.beside:
            beside.lacks()
            beside.end()
        workers.sessions[1].segment = enough
        workers.start(5, 0, 1)
        assert [beside.state for beside in workers.beside] == [NOTHING, NOTHING]
        assert workers.segments.groups == {"group-1/beside-4"}
        workers.next_term()
        workers.start(6, 0, 1)
        assert all(map(came, workers.beside))
