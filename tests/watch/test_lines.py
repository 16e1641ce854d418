"""Following logs that grow, and folding what several workers say alike."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.watch.lines import Fold, Follower, aligned, compact, shortened


class Log:
    """A file that another process writes, in pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path / "worker-0.log"
        self.follower = Follower(self.path)

    def says(self, data: str | bytes) -> list[str]:
        with open(self.path, "ab") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
        return self.follower.read()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_a_file_that_is_not_there_yet_has_said_nothing(log: Log) -> None:
    assert log.follower.read() == []
    assert log.follower.read(last=True) == []
    assert log.says("hello\n") == ["hello\n"]


def test_lines_come_once_and_whole(log: Log) -> None:
    assert log.says("one\ntwo\nthr") == ["one\n", "two\n"]
    assert log.follower.read() == []
    assert log.says("ee") == []
    assert log.says("\nfour\n") == ["three\n", "four\n"]


def test_an_unfinished_line_comes_at_the_end(log: Log) -> None:
    assert log.says("no newline") == []
    assert log.follower.read(last=True) == ["no newline"]
    assert log.follower.read(last=True) == []
    assert log.says(" more\n") == [" more\n"]


def test_a_progress_bar_comes_as_far_as_its_carriage_return(log: Log) -> None:
    assert log.says("start\n 10%\r 20%\r 3") == ["start\n", " 10%\r", " 20%\r"]
    assert log.says("0%\r") == [" 30%\r"]
    assert log.says("done\n") == ["done\n"]


def test_blank_lines_are_kept(log: Log) -> None:
    assert log.says("a\n\n\nb\n") == ["a\n", "\n", "\n", "b\n"]


def test_a_character_cut_in_two_is_put_together(log: Log) -> None:
    raw = "größe ×2\n".encode()
    assert log.says(raw[:3]) == []
    assert log.says(raw[3:]) == ["größe ×2\n"]


def test_bytes_that_are_no_text_do_not_stop_it(log: Log) -> None:
    assert log.says(b"\xff\xfe\n") == ["��\n"]


@given(st.text(alphabet="ab\n\r×", max_size=60), st.lists(st.integers(0, 80), max_size=8))
def test_however_it_grows_nothing_is_lost_or_said_twice(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder))
        said = [line for a, b in itertools.pairwise(places) for line in log.says(raw[a:b])]
        said += log.follower.read(last=True)
    assert "".join(said) == text
    assert all(line.count("\n") + line.count("\r") <= 1 for line in said)


# folding


def test_what_workers_say_alike_is_said_once() -> None:
    fold = Fold(hold_s=1.0)
    for worker in (2, 0, 1):
        fold.add(worker, "epoch 1\n", now=10.0)
    assert fold.due(now=10.5) == []
    assert fold.due(now=11.0) == [("0-2", "epoch 1  (×3)")]
    assert fold.due(now=99.0) == []


def test_a_line_of_one_worker_is_as_it_was() -> None:
    fold = Fold(hold_s=1.0)
    fold.add(3, "loss 0.5\n", now=0.0)
    assert fold.due(now=1.0) == [("3", "loss 0.5")]


def test_a_repeated_line_of_one_worker_is_counted() -> None:
    fold = Fold(hold_s=1.0)
    for _ in range(4):
        fold.add(1, "warning\n", now=0.0)
    fold.add(2, "warning\n", now=0.5)
    assert fold.due(now=1.0) == [("1-2", "warning  (×5)")]


def test_lines_keep_the_order_in_which_they_first_came() -> None:
    fold = Fold(hold_s=1.0)
    fold.add(0, "first\n", now=0.0)
    fold.add(1, "second\n", now=0.25)
    fold.add(0, "second\n", now=0.5)
    fold.add(1, "first\n", now=0.5)
    assert fold.due(now=1.0) == [("0-1", "first  (×2)")]
    assert fold.due(now=1.25) == [("0-1", "second  (×2)")]


def test_a_line_that_comes_again_later_is_said_again() -> None:
    fold = Fold(hold_s=1.0)
    fold.add(0, "again\n", now=0.0)
    assert len(fold.due(now=1.0)) == 1
    fold.add(0, "again\n", now=2.0)
    assert fold.due(now=2.5) == []
    assert fold.due(now=3.0) == [("0", "again")]


def test_at_the_end_everything_is_said() -> None:
    fold = Fold(hold_s=100.0)
    fold.add(0, "a\n", now=0.0)
    fold.add(1, "b", now=0.0)
    assert fold.due(now=0.0, all=True) == [("0", "a"), ("1", "b")]


@pytest.mark.parametrize(
    ("workers", "text"),
    [([], ""), ([4], "4"), ([0, 1], "0-1"), ([0, 2, 4], "0,2,4"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")],
)
def test_workers_are_named_shortly(workers: list[int], text: str) -> None:
    assert compact(workers) == text


def test_columns_are_straight_and_the_last_is_free() -> None:
    assert aligned([("a", "long one", "x"), ("bcd", "", "no end " * 9), ("e", "f", "")]) == [
        "a    long one  x",
        "bcd            " + ("no end " * 9).rstrip(),
        "e    f",
    ]
    assert aligned([]) == []


@pytest.mark.parametrize(("width", "text"), [(20, "finished"), (8, "finished"), (7, "finish…"), (1, "…")])
def test_what_is_too_long_ends_with_an_ellipsis(width: int, text: str) -> None:
    assert shortened("finished", width) == text
