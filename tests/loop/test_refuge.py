"""Where a run goes back to: what lies in some machine's memory, or on disk, whichever is newer; the other workers are scripted."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ResourceError
from paceline.loop.refuge import Refuge
from paceline.state.checkpoint import name_of
from paceline.tensors.snapshot import Snapshot

MINE = None
NO_STATE = -1


@pytest.fixture
def refuge() -> Iterator[Callable[..., Refuge]]:
    """This machine's; `room` bytes are all that it has for one segment."""
    held: dict[str, int] = {}
    all_made: list[Refuge] = []

    def make(*steps: int, room: int = 1 << 30) -> Refuge:
        def segment(name: str, size: int) -> int:
            if size > room:
                raise ResourceError("no memory")
            if name not in held:
                held[name] = os.memfd_create(name.replace("/", "-"))
                os.ftruncate(held[name], size)
            return os.dup(held[name])

        session: Any = SimpleNamespace(apart=True, dry_run=False, segment=segment, worker=0)
        made = Refuge(session)
        all_made.append(made)
        for step in steps:
            if made.claim():
                made.leave(step, Snapshot({"step": step}))
        return made

    yield make
    while all_made:
        with suppress(ResourceError):
            locker = all_made.pop()._locker
            assert locker is not None
            locker.close()
    for fd in held.values():
        os.close(fd)


class Terms:
    """What all say at each meeting, in the order of ranks; MINE: what this worker does."""

    def __init__(self, *meetings: list[bytes | None]) -> None:
        self._meetings = list(meetings)

    def gather(self, key: int, payload: Callable[[], bytes]) -> list[bytes]:
        own = payload()
        return [own if said is MINE else said for said in self._meetings.pop(0)]


def at(step: int, worker: int = 7) -> bytes:
    return struct.pack("<qq", step, worker)


def went_back(refuge: Refuge, worker: int, written: int, *meetings: list[bytes | None]) -> Any:
    """To which step: in memory, by its state; on disk, by its name. `written`: the newest there that main knows of."""
    refuge._session.worker = worker
    terms: Any = Terms(*meetings)
    name, state = refuge.newest(terms, lambda above: name_of(written) if written > max(above, 0) else "")
    assert not terms._meetings
    return Snapshot.read(memoryview(state)).tree["step"] if state else name


def test_the_newest_state_in_memory_counts(refuge: Callable[..., Refuge]) -> None:
    assert went_back(refuge(20, 40), 0, 40, [MINE, at(20)], [MINE, b""], [MINE, b""]) == 40, "no older than on disk"


def test_what_every_machine_has_is_sent_to_nobody(refuge: Callable[..., Refuge]) -> None:
    assert went_back(refuge(40), 1, 0, [at(40), MINE, at(40)], [b"", MINE, b""]) == 40


def test_another_machines_may_be_newer(refuge: Callable[..., Refuge]) -> None:
    theirs = bytes(Snapshot({"step": 60}).packed())
    meetings = [MINE, at(NO_STATE), at(60), at(60)], [MINE, b"", b"", b""], [MINE, b"", theirs, b""]
    assert went_back(refuge(40), 0, 40, *meetings) == 60


@pytest.mark.parametrize("steps", [(), (40,)], ids=["none", "older"])
def test_a_newer_checkpoint_on_disk_counts(refuge: Callable[..., Refuge], steps: tuple[int, ...]) -> None:
    assert went_back(refuge(*steps), 0, 60, [MINE, at(NO_STATE)], [MINE, b""]) == name_of(60)
    assert went_back(refuge(*steps), 1, 0, [at(40), MINE], [name_of(60).encode(), MINE]) == name_of(60), (
        "main knows of it"
    )


def test_with_neither_the_run_begins_again(refuge: Callable[..., Refuge]) -> None:
    assert went_back(refuge(), 0, 0, [MINE, at(NO_STATE)], [MINE, b""]) == ""


def test_if_whoever_had_it_is_lost_the_next_best_counts(refuge: Callable[..., Refuge]) -> None:
    assert went_back(refuge(40), 0, 0, [MINE, at(60)], [MINE, b""], [MINE], [MINE], [MINE]) == 40


def test_one_who_moves_up_when_others_are_lost_sends_no_more_than_before(refuge: Callable[..., Refuge]) -> None:
    """Worker 0 had the newest state and was lost while main looked for checkpoints: worker 1 has its rank, and not its state."""
    assert went_back(refuge(), 1, 0, [at(40, 0), MINE], [MINE], [MINE], [MINE], [MINE]) == ""
    newer = [at(40, 0), MINE, at(NO_STATE, 2)], [b"", b""], [MINE, b""]
    assert went_back(refuge(20), 1, 0, *newer, [MINE, at(NO_STATE, 2)], [name_of(30).encode(), b""]) == name_of(30)


@pytest.mark.parametrize("room", [4096, 100], ids=["none for a state", "none at all"])
def test_a_machine_without_memory_says_so_once_and_has_none(
    refuge: Callable[..., Refuge], capsys: pytest.CaptureFixture[str], room: int
) -> None:
    small = refuge(20, 40, room=room)
    assert capsys.readouterr().err.count("no copy of the run's state at step 0 or later fits") == 1
    assert went_back(small, 0, 20, [MINE, at(NO_STATE)], [MINE, b""]) == name_of(20)
    theirs = bytes(Snapshot({"step": 60}).packed())
    assert went_back(small, 0, 20, [MINE, at(60)], [MINE, b""], [MINE, theirs]) == 60, (
        "another machine's comes all the same"
    )
