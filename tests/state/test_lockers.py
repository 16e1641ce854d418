"""A replica's locker: one owner at a time, and always a whole state in it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.state.lockers import Locker
from paceline.tensors.snapshot import Snapshot

_SUBREAPER = 36
Segments = Callable[[str, int], int]


@pytest.fixture
def segments() -> Iterator[Segments]:
    """As the agent gives them: by name, one memory for all who ask."""
    kept: dict[str, int] = {}

    def segment(name: str, size: int) -> int:
        if name not in kept:
            kept[name] = os.memfd_create(name)
            os.ftruncate(kept[name], size)
        assert os.fstat(kept[name]).st_size == size
        return os.dup(kept[name])

    yield segment
    for fd in kept.values():
        os.close(fd)


def state(number: int, numel: int = 1000) -> Snapshot:
    return Snapshot({"number": number, "tensor": torch.full((numel,), float(number))})


def test_what_was_put_last_is_found_by_another_process_however_it_grows(segments: Segments) -> None:
    mine, theirs = Locker(2, segments), Locker(2, segments)
    assert theirs.empty
    for number, numel in enumerate((10, 10, 100_000, 100_000, 10)):
        mine.put(number, state(number, numel))
        assert theirs.rounds == number and not theirs.empty
        found = Snapshot.read(theirs.look()).tree
        assert found["number"] == number and torch.equal(found["tensor"], torch.full((numel,), float(number)))
    for locker in (mine, theirs):
        locker.close()


def test_what_is_copied_while_its_owner_puts_two_of_the_same_round_is_one_of_them(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a loop, and where the next one begins; then it is at the next round's, over the first of these."""
    mine, theirs = Locker(2, segments), Locker(2, segments)
    mine.put(5, state(1))
    mine.put(5, state(2))
    look, looks = theirs.look, []

    def looking() -> memoryview:
        found = look()
        looks.append(len(looks))
        if len(looks) == 1:
            mine.put(5, state(3))
            mine.room_for(state(4).nbytes)[:64] = bytes(64)  # over what is being copied; not whole yet
        return found

    monkeypatch.setattr(theirs, "look", looking)
    rounds, copied = theirs.copied()
    tree = Snapshot.read(copied).tree
    assert rounds == 5 and tree["number"] == 3 and torch.equal(tree["tensor"], torch.full((1000,), 3.0))
    for locker in (mine, theirs):
        locker.close()


@pytest.mark.parametrize("numel", [10, 100_000])
def test_a_state_that_is_not_whole_does_not_count(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    locker = Locker(0, segments)
    locker.put(7, state(7))

    def torn(self: Snapshot, memory: memoryview) -> None:
        memory[:] = b"\xff" * len(memory)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "write", torn)
        with pytest.raises(KeyboardInterrupt):
            locker.put(8, state(8, numel))
    assert locker.rounds == 7
    assert Snapshot.read(locker.look()).tree["number"] == 7
    locker.put(8, state(8, numel))
    assert Snapshot.read(locker.look()).tree["number"] == 8
    locker.close()


def test_it_belongs_to_one_process_and_is_free_when_that_is_killed_whatever_its_children_do(segments: Segments) -> None:
    assert ctypes.CDLL(None).prctl(_SUBREAPER, 1) == 0  # the owner's child is ours to wait for when the owner is dead
    context = multiprocessing.get_context("fork")
    said, heard = context.Pipe()
    os.close(segments("replica-0/0", 4096))

    def hold() -> None:
        locker = Locker(0, segments)
        claimed = locker.claim()
        child = os.fork()
        if not child:
            signal.pause()
        said.send((claimed, child))
        signal.pause()

    owner = context.Process(target=hold)
    owner.start()
    claimed, child = heard.recv()
    try:
        mine = Locker(0, segments)
        assert claimed and not mine.claim()
        owner.kill()
        owner.join()
        assert mine.claim()
        assert mine.claim(), "it has it still"
        mine.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        owner.close()
        said.close(), heard.close()
