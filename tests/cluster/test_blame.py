"""When an exception is its worker's own fault, and when it ends the run."""

from __future__ import annotations

import msgspec
import pytest

from paceline.cluster.blame import MOST, Raised, why_it_ends

BAD = Raised.of(1, "ValueError: bad sample", 17, 3)


def test_the_first_one_is_its_workers_own() -> None:
    assert why_it_ends([], BAD, others=2) is None
    assert BAD.place == "step 17, slot 3" and Raised(1, "", 17).place == "step 17"


def test_the_same_on_a_second_worker_is_the_scripts() -> None:
    again = Raised.of(2, "ValueError: bad sample", 17, 3)
    assert why_it_ends([BAD], again, others=2) == "worker 1 raised it too, at step 17, slot 3"
    assert why_it_ends([BAD], again, others=0) == "worker 1 raised it too, at step 17, slot 3"


@pytest.mark.parametrize(
    "other",
    [
        Raised.of(2, "ValueError: worse sample", 17, 3),
        Raised.of(2, "KeyError: bad sample", 17, 3),
        Raised.of(2, "ValueError: bad sample", 18, 3),
        Raised.of(2, "ValueError: bad sample", 17, 4),
        Raised.of(2, "ValueError: bad sample", 17, -1),
    ],
)
def test_anything_else_is_another_one(other: Raised) -> None:
    assert why_it_ends([BAD], other, others=1) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: <Sample object at 0x7f00aB12>", "KeyError: <Sample object at 0x7fe39c>"),
        (
            "RuntimeError: DataLoader worker (pid(s) 311, 312) exited",
            "RuntimeError: DataLoader worker (pid(s) 9, 10) exited",
        ),
        ("OutOfMemoryError: 3.25 MiB is free", "OutOfMemoryError: 12.5 MiB is free"),
    ],
)
def test_addresses_and_numbers_differ_by_worker(one: str, other: str) -> None:
    assert Raised.of(1, one, 5, 0).same_as(Raised.of(2, other, 5, 0))


def test_one_from_a_loaders_process_is_the_same_as_one_from_here() -> None:
    there = (
        "ValueError: Caught ValueError in DataLoader worker process 1.\nOriginal Traceback …\nValueError: bad sample\n"
    )
    assert Raised.of(2, there, 17, 3).same_as(BAD)
    assert Raised.of(2, "", 17, 3).said == ""


def test_the_last_worker_has_nobody_who_could_go_on() -> None:
    assert why_it_ends([], BAD, others=0) == ""


def test_not_for_ever() -> None:
    known = [Raised.of(k, f"ValueError: {'x' * k}", k, -1) for k in range(1, MOST + 1)]
    assert why_it_ends(known[:-1], known[-1], others=1) is None
    why = why_it_ends(known, Raised.of(9, "ValueError", 50, -1), others=1)
    assert why is not None and why.startswith("workers 1, 2 and 3 were lost to exceptions")


def test_it_is_kept_whole_but_not_at_any_length() -> None:
    raised = Raised.of(1, "ValueError: " + "x" * 10**6, 1, -1)
    assert len(raised.said) < 1000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raised), type=Raised) == raised
