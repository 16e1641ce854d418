"""A mirror shows what is shared, is changed by its own process alone, and follows again when told to."""

from __future__ import annotations

import mmap
import os
import random
import signal
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.tensors.mirror import Mirror

PAGE = mmap.PAGESIZE
PAGES = 40
FLOATS = PAGES * PAGE // 4
PER_PAGE = PAGE // 4


def make(size: int = PAGES * PAGE) -> tuple[Mirror, torch.Tensor, torch.Tensor]:
    """A mirror, and its memory as those see it who write it, and as the script does."""
    fd = os.memfd_create("mirror")
    os.ftruncate(fd, Mirror.needs(size))
    mirror = Mirror(fd, size)
    return (
        mirror,
        mirror.shared.tensor(0, size // 4, torch.float32),
        mirror.own.tensor(0, size // 4, torch.float32),
    )


def follow(mirror: Mirror) -> float:
    share = mirror.look()
    mirror.catch_up()
    return share


def test_what_is_shared_is_seen_and_costs_no_copy() -> None:
    mirror, shared, own = make()
    for value in (1.0, 2.0):
        shared.fill_(value)
        assert follow(mirror) == 0.0
        assert (own == value).all()


WAYS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "torch": lambda own, at: own[at].mul_(0.5),
    "data": lambda own, at: own.data[at].fill_(-1.0),
    "numpy": lambda own, at: own.numpy().__setitem__(at, -1.0),
    "the same value": lambda own, at: own[at].mul_(1.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_page_that_was_written_follows_again(way: str) -> None:
    mirror, shared, own = make()
    for turn, at in enumerate((0, PER_PAGE - 1, PER_PAGE, 7 * PER_PAGE + 3, FLOATS - 1)):
        shared.fill_(turn)
        follow(mirror)
        assert (own == turn).all(), f"before {at} was written"
        WAYS[way](own, at)
        assert (shared == turn).all(), "the others do not see it"


def test_the_share_of_pages_is_exact(seed: int) -> None:
    dice = random.Random(seed)
    for count in (1, 2, 17, PAGES):
        mirror, shared, own = make()
        shared.fill_(1.0)
        for page in dice.sample(range(PAGES), count):
            own[page * PER_PAGE + dice.randrange(PER_PAGE)] = 9.0
        assert mirror.look() == count / PAGES
        shared.fill_(2.0)
        mirror.catch_up()
        assert (own == 2.0).all()


def test_memory_that_ends_within_a_page() -> None:
    mirror, shared, own = make(PAGE + 64)
    own.fill_(5.0)
    shared.fill_(1.0)
    assert follow(mirror) == 1.0
    assert (own == 1.0).all() and len(own) == PER_PAGE + 16


@pytest.mark.parametrize("pagemap", ["/proc/self/no-such-file", "/dev/zero", "/dev/null"])
def test_where_the_kernel_does_not_tell_every_page_counts_as_written(
    monkeypatch: pytest.MonkeyPatch, pagemap: str
) -> None:
    monkeypatch.setattr("paceline.tensors.mirror._PAGEMAP", pagemap)
    mirror, shared, own = make()
    own[3 * PER_PAGE] = 9.0
    shared.fill_(1.0)
    assert follow(mirror) == 1.0
    assert (own == 1.0).all()


def test_a_forked_loader_process_changes_nothing() -> None:
    """Pages are shared with the child until either writes: still the parent's writes alone are the parent's."""
    mirror, shared, own = make()
    own[: 2 * PER_PAGE] = 9.0
    child = os.fork()
    if child == 0:
        own[20 * PER_PAGE :] = 7.0
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        own[PER_PAGE : 3 * PER_PAGE] = 8.0
        shared.fill_(1.0)
        assert follow(mirror) == 3 / PAGES
        assert (own == 1.0).all()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_several_mirrors_of_one_memory_are_apart() -> None:
    fd = os.memfd_create("mirror")
    os.ftruncate(fd, Mirror.needs(PAGE))
    first, second = Mirror(os.dup(fd), PAGE), Mirror(fd, PAGE)
    one, two = (np.asarray(mirror.own.words(0, PAGE // 8)) for mirror in (first, second))
    one[:] = 5
    assert not two.any() and not first.shared.words(0, PAGE // 8).any()
    second.shared.words(0, PAGE // 8)[:] = 3
    for mirror in (first, second):
        follow(mirror)
    assert (one == 3).all() and (two == 3).all()
